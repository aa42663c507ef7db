"""The reference against others' code: transformers, torch and the host, and document by document."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.cases import CONV_WIDTH, FP32_TRUTH, FP64_TRUTH, GVA_HEADS, PACKINGS
from tests.helpers.compare import assert_close
from tests.helpers.reference import (
    AttentionSizes,
    GDNSizes,
    apply_rope_reference,
    attention_reference,
    causal_conv_reference,
    gated_attention_reference,
    gated_delta_net_reference,
    gated_delta_rule_reference,
)

PACKED = [name for name, case in PACKINGS.items() if case.cu_seqlens and case.seq_len <= 128]


def _documents(name: str) -> list[slice]:
    """The documents of a case that hold tokens."""
    borders = PACKINGS[name].borders
    return [slice(a, b) for a, b in zip(borders, borders[1:], strict=False) if b > a]


def _rule_inputs(batch: int, seq_len: int, sizes: GDNSizes, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, a, b, A_log, dt_bias with gradients wanted."""
    num_k, num_v, k_dim, v_dim = sizes
    shapes = [(num_k, k_dim), (num_k, k_dim), (num_v, v_dim), (num_v,), (num_v,)]
    inputs = [torch.randn(batch, seq_len, *shape, dtype=dtype) for shape in shapes]
    inputs += [torch.empty(num_v, dtype=dtype).uniform_(0.1, 4).log(), torch.randn(num_v, dtype=dtype)]
    return [x.requires_grad_() for x in inputs]


RULE_INPUTS = ("q", "k", "v", "a", "b", "A_log", "dt_bias")


def _compare_with_grads(
    inputs: list[Tensor], got: Tensor, want: Tensor, tolerance: float | dict[str, float]
) -> None:
    """Outputs and the gradients of every input under one random upstream gradient."""
    names = tuple(tolerance) if isinstance(tolerance, dict) else range(len(inputs))
    tolerances = list(tolerance.values()) if isinstance(tolerance, dict) else [tolerance] * len(inputs)
    upstream = torch.randn_like(want)
    assert_close("output", got, want, min(tolerances))
    got_grads = torch.autograd.grad(got, inputs, upstream)
    want_grads = torch.autograd.grad(want, inputs, upstream)
    for name, g, w, limit in zip(names, got_grads, want_grads, tolerances, strict=True):
        assert_close(f"gradient of input {name}", g, w, limit)


@pytest.mark.parametrize("heads", GVA_HEADS)
@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_rule_agrees_with_transformers(rule, heads):
    """The rule of transformers' Qwen3-Next, chunked and recurrent, on dense streams of 100 tokens."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    inputs = _rule_inputs(2, 100, GVA_HEADS[heads], torch.float32)
    q, k, v, a, b, A_log, dt_bias = inputs
    g = -A_log.exp() * F.softplus(a + dt_bias)
    their_rule = inspect.unwrap(getattr(modeling_qwen3_next, rule))  # wrapped, it would call fla's kernel
    theirs, _ = their_rule(q, k, v, g, b.sigmoid(), use_qk_l2norm_in_kernel=True)
    ours = gated_delta_rule_reference(*inputs, torch.arange(100).repeat(2, 1))
    limits = dict.fromkeys(RULE_INPUTS, FP32_TRUTH)
    if rule == "torch_chunk_gated_delta_rule":
        # Their chunks take differences of running sums of g, whose rounding the gates' gradients sum up:
        # over 36 draws it measures up to 4e-5 against float64, where one by one stays below 2e-6.
        limits |= {"A_log": 1e-4, "dt_bias": 1e-4}
    _compare_with_grads(inputs, ours, theirs, limits)


def test_rule_is_the_equation_of_the_paper():
    """Two tokens of one head, with the matrices of the equation written out."""
    q, k, v, a, b, A_log, dt_bias = _rule_inputs(1, 2, GDNSizes(1, 1, 3, 2), torch.float64)
    out = gated_delta_rule_reference(q, k, v, a, b, A_log, dt_bias, torch.tensor([[0, 1]]))
    state = torch.zeros(3, 2, dtype=torch.float64)
    for t in range(2):
        key, query = (x[0, t, 0] / (x[0, t, 0].square().sum() + 1e-6).sqrt() for x in (k, q))
        g = -A_log[0].exp() * (1 + (a[0, t, 0] + dt_bias[0]).exp()).log()
        beta = 1 / (1 + (-b[0, t, 0]).exp())
        erase = torch.eye(3, dtype=torch.float64) - beta * torch.outer(key, key)
        state = g.exp() * erase @ state + beta * torch.outer(key, v[0, t, 0])
        assert_close(f"o_{t}", out[0, t, 0], state.T @ query / 3**0.5, FP64_TRUTH)


@pytest.mark.parametrize("name", PACKED)
def test_rule_of_packed_stream_is_the_rule_of_each_document(name):
    """Outputs and gradients of a packed stream equal those of its documents one by one."""
    case = PACKINGS[name]
    inputs = _rule_inputs(1, case.seq_len, GVA_HEADS["gva2"], torch.float64)
    packed = gated_delta_rule_reference(*inputs, case.positions)
    parts = []
    for cut in _documents(name):
        tokens = [x[:, cut] for x in inputs[:5]]
        positions = torch.arange(cut.stop - cut.start)[None]
        parts.append(gated_delta_rule_reference(*tokens, *inputs[5:], positions))
    _compare_with_grads(inputs, packed, torch.cat(parts, 1), FP64_TRUTH)


@pytest.mark.parametrize("name", ["one_document", "batch_of_2", "not_64", *PACKED])
def test_conv_agrees_with_conv1d_of_each_document(name):
    """The convolution equals torch's on every document alone, padded in front with zeros."""
    case = PACKINGS[name]
    x = torch.randn(case.batch, case.seq_len, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, CONV_WIDTH, dtype=torch.float64, requires_grad=True)
    parts = [
        F.silu(F.conv1d(F.pad(x[:, cut].transpose(1, 2), (CONV_WIDTH - 1, 0)), weight[:, None], groups=6))
        for cut in _documents(name)
    ]
    want = torch.cat(parts, 2).transpose(1, 2)
    _compare_with_grads([x, weight], causal_conv_reference(x, weight, case.positions), want, FP64_TRUTH)


@pytest.mark.parametrize("name", ["one_document", "batch_of_2", "not_64", *PACKED])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_agrees_with_sdpa_of_each_document(name, kv_heads):
    """Attention equals torch's causal attention on every document alone."""
    case = PACKINGS[name]
    inputs = [
        torch.randn(case.batch, case.seq_len, heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    parts = []
    for cut in _documents(name):
        q, k, v = (x[:, cut].transpose(1, 2) for x in inputs)
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True))
    want = torch.cat(parts, 2).transpose(1, 2)
    got = attention_reference(*inputs, case.positions, 0.3)
    _compare_with_grads(inputs, got, want, FP64_TRUTH)


def test_rope_agrees_with_the_host():
    """Partial RoPE equals the host's tables and rotation, from position 0 on."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    table = RotaryEmbedding(32, 0.25, rotary_base=10_000_000, use_cpu_initialization=True)
    freqs = table.get_freqs_non_repeated(50)
    freqs = torch.cat([freqs, freqs], -1)[:, None, None]
    x = torch.randn(2, 50, 3, 32)
    got = apply_rope_reference(x, torch.arange(50).repeat(2, 1), rotary_percent=0.25, base=10_000_000)
    want = _apply_rotary_pos_emb_bshd(x.transpose(0, 1), freqs).transpose(0, 1)
    assert_close("turned heads", got, want, FP32_TRUTH)


class HostLinear(torch.nn.Module):
    """A linear that answers as the host's do: (output, bias)."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class HostNorm(torch.nn.Module):
    """RMSNorm as torch computes it."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def _random_params(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: (0.2 * torch.randn(shape)).requires_grad_() for name, shape in shapes.items()}


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gated_attention_agrees_with_the_host(zero_centered):
    """The layer equals the host's split of linear_qkv, rotation and output gate around torch's attention."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.attention import SelfAttention

    sizes = AttentionSizes(num_heads=6, num_query_groups=2, head_dim=16)
    eps, base, percent, hidden_size, seq_len = 1e-6, 10_000.0, 0.25, 20, 40
    params = _random_params(
        {
            "linear_qkv.weight": ((2 * 6 + 2 * 2) * 16, hidden_size),
            "q_layernorm.weight": (16,),
            "k_layernorm.weight": (16,),
            "linear_proj.weight": (hidden_size, 6 * 16),
        }
    )
    hidden = torch.randn(2, seq_len, hidden_size, requires_grad=True)

    def norm(name: str) -> HostNorm:
        return HostNorm(params[name] + 1 if zero_centered else params[name], eps)

    host = SimpleNamespace(
        linear_qkv=HostLinear(params["linear_qkv.weight"]),
        q_layernorm=norm("q_layernorm.weight"),
        k_layernorm=norm("k_layernorm.weight"),
        num_attention_heads_per_partition=6,
        num_query_groups_per_partition=2,
        hidden_size_per_attention_head=16,
        world_size=1,
        config=SimpleNamespace(num_query_groups=2, test_mode=False),
    )
    q, k, v, gate = SelfAttention.get_query_key_value_tensors(host, hidden.transpose(0, 1), output_gate=True)
    freqs = RotaryEmbedding(16, percent, rotary_base=base, use_cpu_initialization=True)
    freqs = freqs.get_freqs_non_repeated(seq_len)
    freqs = torch.cat([freqs, freqs], -1)[:, None, None]
    q, k = (_apply_rotary_pos_emb_bshd(x, freqs) for x in (q, k))
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    o = SelfAttention._apply_output_gate(host, o.permute(2, 0, 1, 3).flatten(2), gate)
    want = F.linear(o, params["linear_proj.weight"]).transpose(0, 1)

    got = gated_attention_reference(
        hidden,
        params,
        sizes,
        eps=eps,
        zero_centered=zero_centered,
        rotary_percent=percent,
        rotary_base=base,
        positions=torch.arange(seq_len).repeat(2, 1),
    )
    _compare_with_grads([hidden, *params.values()], got, want, FP32_TRUTH)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("heads", GVA_HEADS)
def test_gated_delta_net_agrees_with_the_host(heads, zero_centered, monkeypatch):
    """The layer equals the host's forward (deterministic, cp 1), with a torch l2norm instead of a kernel."""
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet

    def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
        return x / (x.square().sum(dim, keepdim=True) + eps).sqrt()

    monkeypatch.setattr(common, "l2norm", l2norm)
    num_k, num_v, k_dim, v_dim = sizes = GVA_HEADS[heads]
    qk, values, hidden_size, eps = num_k * k_dim, num_v * v_dim, 24, 1e-6
    params = _random_params(
        {
            "in_proj.weight": (2 * qk + 2 * values + 2 * num_v, hidden_size),
            "conv1d.weight": (2 * qk + values, 1, CONV_WIDTH),
            "A_log": (num_v,),
            "dt_bias": (num_v,),
            "out_norm.weight": (v_dim,),
            "out_proj.weight": (hidden_size, values),
        }
    )
    hidden = torch.randn(2, 70, hidden_size, requires_grad=True)

    host = GatedDeltaNet.__new__(GatedDeltaNet)  # its __init__ wants a GPU and its kernels
    torch.nn.Module.__init__(host)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    scale = params["out_norm.weight"] + 1 if zero_centered else params["out_norm.weight"]
    settings = dict(
        config=SimpleNamespace(deterministic_mode=True),
        pg_collection=SimpleNamespace(cp=group, tp=group),
        conv1d=SimpleNamespace(
            weight=params["conv1d.weight"], stride=1, padding=CONV_WIDTH - 1, dilation=1, bias=None
        ),
        A_log=params["A_log"],
        dt_bias=params["dt_bias"],
        in_proj=HostLinear(params["in_proj.weight"]),
        out_norm=HostNorm(scale, eps),
        out_proj=HostLinear(params["out_proj.weight"]),
        cp_size=1,
        sp_size=1,
        tp_size=1,
        num_key_heads=num_k,
        num_value_heads=num_v,
        key_head_dim=k_dim,
        value_head_dim=v_dim,
        qk_dim_local_tp=qk,
        v_dim_local_tp=values,
        num_v_heads_local_tp=num_v,
        conv_dim_local_tp=2 * qk + values,
        act_fn=F.silu,
        use_qk_l2norm=True,
        conv_bias=False,
        recompute_norm_out=False,
    )
    for name, value in settings.items():
        object.__setattr__(host, name, value)
    host._setup_variant_attrs()
    want = host.forward(hidden.transpose(0, 1), None)[0].transpose(0, 1)

    got = gated_delta_net_reference(
        hidden,
        params,
        sizes,
        eps=eps,
        zero_centered=zero_centered,
        positions=torch.arange(70).repeat(2, 1),
    )
    _compare_with_grads([hidden, *params.values()], got, want, FP32_TRUTH)


def test_packed_layers_are_the_layers_of_each_document():
    """Both whole layers, packed with short and empty documents, equal their documents one by one."""
    name = "empty_documents"
    case = PACKINGS[name]
    hidden = torch.randn(1, case.seq_len, 12, dtype=torch.float64)
    gdn_sizes, attention_sizes = GDNSizes(1, 2, 4, 6), AttentionSizes(2, 1, 8)
    gdn = _random_params(
        {
            "in_proj.weight": (8 + 24 + 4, 12),
            "conv1d.weight": (20, 1, CONV_WIDTH),
            "A_log": (2,),
            "dt_bias": (2,),
            "out_norm.weight": (6,),
            "out_proj.weight": (12, 12),
        }
    )
    attention = _random_params(
        {
            "linear_qkv.weight": (48, 12),
            "q_layernorm.weight": (8,),
            "k_layernorm.weight": (8,),
            "linear_proj.weight": (12, 16),
        }
    )

    def layers(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        shared = dict(eps=1e-6, zero_centered=True, positions=positions)
        return (
            gated_delta_net_reference(x, {k: v.double() for k, v in gdn.items()}, gdn_sizes, **shared),
            gated_attention_reference(
                x,
                {k: v.double() for k, v in attention.items()},
                attention_sizes,
                rotary_percent=0.5,
                rotary_base=100.0,
                **shared,
            ),
        )

    packed = layers(hidden, case.positions)
    cuts = _documents(name)
    alone = [layers(hidden[:, cut], torch.arange(cut.stop - cut.start)[None]) for cut in cuts]
    for layer, got, parts in zip(
        ("GatedDeltaNet", "attention"), packed, zip(*alone, strict=True), strict=True
    ):
        assert_close(layer, got, torch.cat(parts, 1), FP64_TRUTH)
