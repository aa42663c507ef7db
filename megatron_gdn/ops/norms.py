"""RMSNorm with an optional zero-centred weight, plain and gated, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """x / rms(x) * weight, or * (1 + weight) when zero-centred; computed in fp32, returned in x's dtype.

    Args:
        x: [..., D], any floating dtype.
        weight: [D].
        eps: added to the mean square.
        zero_centered: whether the weight is stored as its difference from one.
    """
    scale = weight.float() + 1.0 if zero_centered else weight.float()
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """rms_norm(x) * silu(gate), the gate in fp32; returned in x's dtype.

    Args:
        x: [..., D], any floating dtype.
        gate: as x.
        weight: [D].
        eps: added to the mean square.
        zero_centered: whether the weight is stored as its difference from one.

    Source: order of casts as in megatron-core 0.19.2, core/ssm/gated_delta_net/common.py,
    `_apply_gated_norm`: the norm is rounded to x's dtype before the gate.
    """
    return (rms_norm(x, weight, eps, zero_centered) * F.silu(gate.float())).to(x.dtype)
