"""RMSNorm with an optional zero-centred weight, plain and gated: Triton on a GPU, plain torch elsewhere."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gdn.ops import norms_triton
from megatron_gdn.ops.triton_rows import MAX_DIM


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """x / rms(x) * weight, or * (1 + weight) when zero-centred; computed in fp32, returned in x's dtype.

    Only the arguments are kept for the backward on a GPU, where it is one kernel each way. Rows of more
    than 16,384 numbers, and float64, go through plain torch.

    Args:
        x: [..., D], any floating dtype; may be a view with other strides.
        weight: [D].
        eps: added to the mean square.
        zero_centered: whether the weight is stored as its difference from one.
    """
    if _fits(x):
        return _TritonNorm.apply(x, None, weight, eps, zero_centered)
    return torch_norm(x, weight, eps, zero_centered)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """rms_norm(x) * silu(gate), the gate in fp32; returned in x's dtype. Kernels as for `rms_norm`.

    Args:
        x: [..., D], any floating dtype.
        gate: as x.
        weight: [D].
        eps: added to the mean square.
        zero_centered: whether the weight is stored as its difference from one.

    Source: order of casts as in megatron-core 0.19.2, core/ssm/gated_delta_net/common.py,
    `_apply_gated_norm`: the norm is rounded to x's dtype before the gate.
    """
    if _fits(x):
        return _TritonNorm.apply(x, gate, weight, eps, zero_centered)
    return (torch_norm(x, weight, eps, zero_centered) * F.silu(gate.float())).to(x.dtype)


def _fits(x: Tensor) -> bool:
    """Whether the Triton kernels take it."""
    return x.is_cuda and x.dtype != torch.float64 and x.shape[-1] <= MAX_DIM


def torch_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """`rms_norm` in plain torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = weight.to(wide.dtype) + 1.0 if zero_centered else weight.to(wide.dtype)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


class _TritonNorm(torch.autograd.Function):
    """Both norms; the plain one has no gate."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, zero_centered: bool):
        ctx.save_for_backward(x, gate, weight)
        ctx.settings = eps, zero_centered
        return norms_triton.launch_forward(x, gate, weight, eps, zero_centered)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor):
        x, gate, weight = ctx.saved_tensors
        d_x, d_gate, d_weight = norms_triton.launch_backward(
            d_out.contiguous(), x, gate, weight, *ctx.settings
        )
        return d_x, d_gate, d_weight.to(weight.dtype), None, None
