"""A small GatedDeltaNet layer, its random parameters, and the truth about it."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_gdn.config import Qwen35Config
from tests.helpers.cases import CONV_WIDTH, HEADS, PACKINGS
from tests.helpers.reference import GDNSizes, gated_delta_net_reference

HIDDEN = 24
EPS = 1e-4
"""Of the output norm. At 1e-6 a token with a nearly empty state has its float32 rounding multiplied by
hundreds: the per-token reference itself, in float32, is then off by 1.4e-5."""


class Truth(NamedTuple):
    """One microbatch through the float64 reference. Batch first, whole stream."""

    hidden: Tensor
    upstream: Tensor
    params: dict[str, Tensor]
    output: Tensor
    hidden_grad: Tensor
    param_grads: dict[str, Tensor]


def config_for(sizes: GDNSizes, *, tp: int = 1, cp: int = 1, **overrides) -> Qwen35Config:
    """A config whose GDN layers have `sizes`."""
    return Qwen35Config(
        **{
            "num_layers": 4,
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 16,
            "linear_attention_freq": 4,
            "linear_conv_kernel_dim": CONV_WIDTH,
            "linear_num_key_heads": sizes.num_key_heads,
            "linear_num_value_heads": sizes.num_value_heads,
            "linear_key_head_dim": sizes.key_head_dim,
            "linear_value_head_dim": sizes.value_head_dim,
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "cp_comm_type": "p2p",
            "normalization": "RMSNorm",
            "layernorm_epsilon": EPS,
            "layernorm_zero_centered_gamma": True,
            "add_bias_linear": False,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "perform_initialization": False,
            "transformer_impl": "local",
            **overrides,
        }
    )


def random_params(sizes: GDNSizes) -> dict[str, Tensor]:
    """Parameters in the host's names, float64 but exact in float32, no two heads alike."""
    qk, v = sizes.num_key_heads * sizes.key_head_dim, sizes.num_value_heads * sizes.value_head_dim
    heads = sizes.num_value_heads
    params = {
        "in_proj.weight": torch.randn(2 * qk + 2 * v + 2 * heads, HIDDEN) / HIDDEN**0.5,
        "conv1d.weight": torch.randn(2 * qk + v, 1, CONV_WIDTH) / 2,
        # From heads that hardly forget to heads that forget at once.
        "A_log": torch.linspace(-3, 2.5, heads)[torch.randperm(heads)],
        "dt_bias": torch.randn(heads),
        "out_norm.weight": torch.randn(sizes.value_head_dim) / 4,
        "out_proj.weight": torch.randn(HIDDEN, v) / v**0.5,
    }
    return {name: p.double() for name, p in params.items()}


@cache
def truth(packing: str, heads: str) -> Truth:
    """Output and every gradient of a case, for random parameters, input and upstream gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, packing + heads)))
        case, sizes = PACKINGS[packing], HEADS[heads]
        params = {k: p.requires_grad_() for k, p in random_params(sizes).items()}
        hidden = torch.randn(case.batch, case.seq_len, HIDDEN).double().requires_grad_()
        upstream = torch.randn(case.batch, case.seq_len, HIDDEN).double()
    output = gated_delta_net_reference(
        hidden, params, sizes, eps=EPS, zero_centered=True, positions=case.positions
    )
    hidden_grad, *grads = torch.autograd.grad(output, [hidden, *params.values()], upstream)
    plain = {k: p.detach() for k, p in params.items()}
    return Truth(
        hidden.detach(), upstream, plain, output.detach(), hidden_grad, dict(zip(params, grads, strict=True))
    )


def tp_shard(name: str, full: Tensor, sizes: GDNSizes, tp: int, rank: int) -> Tensor:
    """The part of a parameter, or of its gradient, that tensor-parallel rank `rank` holds."""
    qk, v = sizes.num_key_heads * sizes.key_head_dim, sizes.num_value_heads * sizes.value_head_dim
    sections = {
        "in_proj.weight": [qk, qk, v, v, sizes.num_value_heads, sizes.num_value_heads],
        "conv1d.weight": [qk, qk, v],
        "A_log": [sizes.num_value_heads],
        "dt_bias": [sizes.num_value_heads],
    }
    if name == "out_norm.weight":
        return full
    if name == "out_proj.weight":
        return full.chunk(tp, dim=1)[rank]
    return torch.cat([part.chunk(tp)[rank] for part in full.split(sections[name])])
