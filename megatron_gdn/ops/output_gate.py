"""The output gate of an attention layer: Triton on a GPU, plain torch elsewhere."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gdn.ops.triton_math import sigmoid
from megatron_gdn.ops.triton_rows import MAX_DIM, grouped_rows, load_rows, tile_of


def gate_output(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), computed in fp32 and rounded once; only the arguments are kept for the backward.

    Args:
        x: [s, B, H D], any floating dtype.
        gate: as many numbers in the same order, [s, B, ..., D], x's dtype; may be a view with other strides.

    Returns:
        As x.
    """
    if x.is_cuda and x.dtype != torch.float64 and gate.shape[-1] <= MAX_DIM:
        return _TritonGate.apply(x, gate)
    return (x * gate.reshape(x.shape).to(torch.promote_types(x.dtype, torch.float32)).sigmoid()).to(x.dtype)


class _TritonGate(torch.autograd.Function):
    """`gate_output` in Triton."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, gate)
        out = torch.empty_like(x)
        if x.numel():
            num_rows, tile = tile_of(gate)
            grid = (triton.cdiv(num_rows, tile["block_rows"]),)
            _forward_kernel[grid](x, *grouped_rows(gate), num_rows, gate.shape[-1], out, **tile)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        d_x, d_gate = torch.empty_like(x), torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if x.numel():
            num_rows, tile = tile_of(gate)
            grid = (triton.cdiv(num_rows, tile["block_rows"]),)
            read = x, *grouped_rows(gate), num_rows, gate.shape[-1], d_out.contiguous()
            _backward_kernel[grid](*read, d_x, d_gate, **tile)
        return d_x, d_gate


@triton.jit
def _forward_kernel(
    x, gate, heads: tl.constexpr, stride, num_rows, dim,
    out, block_rows: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows))[:, None]
    column = tl.arange(0, block_dim)[None, :]
    inside = (row < num_rows) & (column < dim)
    at = row * dim + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value *= sigmoid(load_rows(gate, heads, stride, row, column, dim, inside))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    x, gate, heads: tl.constexpr, stride, num_rows, dim,
    d_out, d_x, d_gate, block_rows: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows))[:, None]
    column = tl.arange(0, block_dim)[None, :]
    inside = (row < num_rows) & (column < dim)
    at = row * dim + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    opened = sigmoid(load_rows(gate, heads, stride, row, column, dim, inside))
    d = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32) * opened
    tl.store(d_x + at, d.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_gate + at, (d * value * (1.0 - opened)).to(d_gate.dtype.element_ty), mask=inside)
