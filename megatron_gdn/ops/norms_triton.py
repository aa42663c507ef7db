"""Triton kernels of RMSNorm, plain and gated, forward and backward.

Every input is read once and every result written once; the backward makes the norm again from x. The
weight's gradient is summed in registers over the many rows that a program takes, written once per program
and added up after the kernel: no atomics, the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_gdn.ops.triton_math import sigmoid
from megatron_gdn.ops.triton_rows import grouped_rows, load_rows, num_programs, tile_of


def launch_forward(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """The norm of `x` [..., D], times silu(gate) if there is one; contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        num_rows, tile = tile_of(x)
        grid = (triton.cdiv(num_rows, tile["block_rows"]),)
        flags = {"zero_centered": zero_centered, "gated": gate is not None}
        _forward_kernel[grid](*_read(x, gate, weight, eps, num_rows), out, **flags, **tile)
    return out


def launch_backward(
    d_out: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of x and gate, contiguous, and of the weight, [D] fp32; `d_out` is contiguous."""
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    if not x.numel():
        return d_x, d_gate, weight.new_zeros(weight.shape, dtype=torch.float32)
    num_rows, tile = tile_of(x)
    blocks = triton.cdiv(num_rows, tile["block_rows"])
    programs = num_programs(blocks, x.device)
    partial = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    flags = {"zero_centered": zero_centered, "gated": gate is not None}
    written = d_x, (x if d_gate is None else d_gate), partial, triton.cdiv(blocks, programs)
    _backward_kernel[(programs,)](*_read(x, gate, weight, eps, num_rows), d_out, *written, **flags, **tile)
    return d_x, d_gate, partial.sum(0)


def _read(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, num_rows: int):
    """What both kernels read, in the order of their arguments."""
    x, x_heads, x_stride = grouped_rows(x)
    gate, gate_heads, gate_stride = (x, 1, 0) if gate is None else grouped_rows(gate)
    weight = weight.contiguous()
    return x, x_heads, x_stride, gate, gate_heads, gate_stride, weight, eps, num_rows, x.shape[-1]


@triton.jit
def _forward_kernel(
    x, x_heads: tl.constexpr, x_stride, gate, gate_heads: tl.constexpr, gate_stride,
    weight, eps, num_rows, dim,
    out, zero_centered: tl.constexpr, gated: tl.constexpr, block_rows: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows))[:, None]
    column = tl.arange(0, block_dim)[None, :]
    inside = (row < num_rows) & (column < dim)
    value = load_rows(x, x_heads, x_stride, row, column, dim, inside)
    scale = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    if zero_centered:
        scale += 1.0
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / dim + eps)[:, None]
    value *= scale
    if gated:
        z = load_rows(gate, gate_heads, gate_stride, row, column, dim, inside)
        value = value.to(out.dtype.element_ty).to(tl.float32) * (z * sigmoid(z))
    tl.store(out + row * dim + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    x, x_heads: tl.constexpr, x_stride, gate, gate_heads: tl.constexpr, gate_stride,
    weight, eps, num_rows, dim,
    d_out, d_x, d_gate, partial, blocks_per_program,
    zero_centered: tl.constexpr, gated: tl.constexpr, block_rows: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block_dim)[None, :]
    scale = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    if zero_centered:
        scale += 1.0
    d_weight = tl.zeros([block_rows, block_dim], tl.float32)
    first = tl.program_id(0).to(tl.int64) * blocks_per_program * block_rows
    for block in range(0, blocks_per_program):
        row = (first + block * block_rows + tl.arange(0, block_rows))[:, None]
        inside = (row < num_rows) & (column < dim)
        at = row * dim + column
        value = load_rows(x, x_heads, x_stride, row, column, dim, inside)
        d = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        if gated:
            z = load_rows(gate, gate_heads, gate_stride, row, column, dim, inside)
        rms = tl.rsqrt(tl.sum(value * value, axis=1) / dim + eps)[:, None]
        value *= rms
        if gated:
            sig = sigmoid(z)
            silu = z * sig
            # The forward rounds the norm before it meets the gate.
            normed = (value * scale).to(d_x.dtype.element_ty).to(tl.float32)
            d_z = d * normed * (sig + silu * (1.0 - sig))
            tl.store(d_gate + at, d_z.to(d_gate.dtype.element_ty), mask=inside)
            d *= silu
        d_weight += d * value
        d *= scale
        along = tl.sum(d * value, axis=1)[:, None] / dim
        tl.store(d_x + at, ((d - value * along) * rms).to(d_x.dtype.element_ty), mask=inside)
    columns = tl.arange(0, block_dim)
    sums = tl.sum(d_weight, axis=0)
    tl.store(partial + tl.program_id(0) * dim + columns, sums, mask=columns < dim)
