"""What a test of one kernel is made of: the sizes of this rank, random input, and what is right.

A case goes through the same door in `ops` as training does, with the head sizes of this rank, so that the
kernel that is tested is the one that will run. What is right is written out in the plainest way, in float64,
and shares nothing with the kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Setup:
    """What the kernels will run on: sizes of one rank, as far as a kernel sees them."""

    device: torch.device
    dtype: torch.dtype
    gdn_backend: str
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    heads: int
    kv_heads: int
    head_dim: int
    rot_dim: int
    """How many dimensions of a head RoPE turns."""
    output_gate: bool
    """Whether attention has one."""
    hidden: int
    eps: float
    num_experts: int
    """Of the whole model; 0 where the experts are not ours (dense, or of TransformerEngine)."""
    topk: int
    expert_ffn: int
    whole: bool
    """Whether streams of one document come."""
    packed: bool
    """Whether streams of several documents come."""
    passes_state: bool
    """Whether the rule's state enters rows from other rows."""
    splits_attention: bool
    """Whether attention meets keys of other spans."""

    @classmethod
    def of(cls, config, device: torch.device, gdn_cp_mode: str | None, packed: bool | None) -> "Setup":
        """From a `Qwen35Config`.

        Args:
            config: the model's.
            device: of the kernels.
            gdn_cp_mode: of the layer spec; None for all modes.
            packed: whether documents are packed; None for both.
        """
        tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
        share = tp * cp if gdn_cp_mode == "headwise" else tp
        moe = config.num_moe_experts if config.transformer_impl == "local" else None
        return cls(
            device=device,
            dtype=config.params_dtype,
            gdn_backend=config.gdn_backend,
            key_heads=max(config.linear_num_key_heads // share, 1),
            value_heads=max(config.linear_num_value_heads // share, 1),
            key_head_dim=config.linear_key_head_dim,
            value_head_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
            heads=max(config.num_attention_heads // tp, 1),
            kv_heads=max(config.num_query_groups // tp, 1),
            head_dim=config.kv_channels,
            rot_dim=int(config.kv_channels * config.rotary_percent),
            output_gate=config.attention_output_gate,
            hidden=config.hidden_size,
            eps=config.layernorm_epsilon,
            num_experts=moe or 0,
            topk=config.moe_router_topk if moe else 0,
            expert_ffn=config.moe_ffn_hidden_size // config.expert_tensor_parallel_size if moe else 0,
            whole=packed is not True,
            packed=packed is not False,
            passes_state=gdn_cp_mode is None or (gdn_cp_mode != "headwise" and cp > 1),
            splits_attention=gdn_cp_mode is None or cp > 1,
        )

    @property
    def on_gpu(self) -> bool:
        """Whether kernels other than plain torch may run."""
        return self.device.type == "cuda"


class Case(NamedTuple):
    """One operation, its input, and what is right."""

    kernel: str
    """Which kernel the door chooses."""
    inputs: dict[str, Tensor]
    """By name, on the device, in the dtype that training has them in."""
    run: Callable[..., list[Tensor]]
    """(inputs, upstream gradient) to the output and the gradient of every input."""
    truth: Callable[..., list[Tensor]]
    """The same from float64 tensors."""
    upstream: Tensor
    """Gradient of the output."""


class Source:
    """Random numbers of a fixed seed, which leaves torch's own generators alone."""

    def __init__(self, setup: Setup):
        self.setup, self.generator = setup, torch.Generator(setup.device).manual_seed(1234)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """[shape] on the device; in the model's dtype unless another is given."""
        values = torch.randn(*shape, generator=self.generator, device=self.setup.device)
        return values.to(dtype or self.setup.dtype)

    def order(self, length: int) -> Tensor:
        """A permutation, int64."""
        return torch.randperm(length, generator=self.generator, device=self.setup.device)

    def numbers(self, length: int, below: int) -> Tensor:
        """[length] of 0 .. below-1, int64."""
        return torch.randint(below, (length,), generator=self.generator, device=self.setup.device)


def differentiated(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """`function` as `Case.run` or `Case.truth`, its gradients by autograd."""

    def run(inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            output = function(*leaves)
            return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    return run
