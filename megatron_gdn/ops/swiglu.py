"""SwiGLU with a weight for each token, as experts need it."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_gdn.ops.triton_math import sigmoid


def weighted_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x[:, :F]) * x[:, F:] * weight, computed in fp32 and rounded once.

    Args:
        x: [T, 2F], gate and up projection, any floating dtype.
        weight: of each token, [T], fp32.

    Returns:
        [T, F] in x's dtype. Only the arguments are kept for the backward pass.
    """
    return _WeightedSwiGLU.apply(x, weight)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if not x.is_cuda:
            gate, up = _halves(x)
            return (F.silu(gate) * up * weight.unsqueeze(-1)).to(x.dtype)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        launch_forward(x.contiguous(), weight.contiguous(), out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if not x.is_cuda:
            return _backward(x, weight, grad)
        d_x, d_weight = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)
        launch_backward(x.contiguous(), weight.contiguous(), grad.contiguous(), d_x, d_weight)
        return d_x, d_weight


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)


def _backward(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = _halves(x)
    sigmoid, silu, scaled = gate.sigmoid(), F.silu(gate), grad * weight.unsqueeze(-1)
    d_gate = scaled * sigmoid * (1 + gate * (1 - sigmoid)) * up
    d_x = torch.cat([d_gate, scaled * silu], -1).to(x.dtype)
    return d_x, (grad * (silu * up)).sum(-1).to(weight.dtype)


def launch_forward(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """The Triton kernel, on contiguous tensors."""
    if out.numel():
        block = triton.next_power_of_2(out.shape[1])
        _forward_kernel[(out.shape[0],)](x, weight, out, out.shape[1], block, num_warps=_warps(block))


def launch_backward(x: Tensor, weight: Tensor, grad: Tensor, d_x: Tensor, d_weight: Tensor) -> None:
    """The Triton kernel, on contiguous tensors."""
    if not grad.numel():
        d_weight.zero_()
        return
    block = triton.next_power_of_2(grad.shape[1])
    grid, width = (grad.shape[0],), grad.shape[1]
    _backward_kernel[grid](x, weight, grad, d_x, d_weight, width, block, num_warps=_warps(block))


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)


@triton.jit
def _forward_kernel(x, weight, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    at = x + row * 2 * width + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    y = gate * sigmoid(gate) * up * tl.load(weight + row)
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(x, weight, grad, d_x, d_weight, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    at = row * 2 * width + columns
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
    d_y = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sig = sigmoid(gate)
    silu = gate * sig
    tl.store(d_weight + row, tl.sum(d_y * silu * up, axis=0))
    d_y *= tl.load(weight + row)
    d_gate = d_y * up * sig * (1 + gate * (1 - sig))
    tl.store(d_x + at, d_gate.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_x + at + width, (d_y * silu).to(d_x.dtype.element_ty), mask=inside)
