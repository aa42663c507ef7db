"""Triton kernels of RMSNorm followed by RoPE, forward and backward.

As in `norms_triton` every input is read once (the dimensions that are turned
twice, the second time from the cache), every result is written once, and the weight's gradient is summed
in registers. The backward makes the norm again.

A dimension that is turned needs its partner, rot_dim / 2 away: a second read of the same row.

Legend: that of `triton_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_gdn.ops.triton_rows import grouped_rows, load_rows, num_programs, tile_of


def launch_forward(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, zero_centered: bool
) -> Tensor:
    """rope(norm(x)), contiguous.

    Args:
        x: [s, ..., D].
        weight: [D].
        cos: [s, 1, 1, rot_dim] fp32, contiguous.
        sin: likewise.
        eps: added to the mean square.
        zero_centered: whether the weight is stored as its difference from one.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        num_rows, tile = tile_of(x)
        grid = (triton.cdiv(num_rows, tile["block_rows"]),)
        _forward_kernel[grid](
            *_read(x, weight, cos, sin, eps, num_rows), out, **_flags(cos, zero_centered), **tile
        )
    return out


def launch_backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    zero_centered: bool,
    d_x: Tensor,
) -> Tensor:
    """Gradient of the weight, [D] fp32; that of x goes to `d_x`, a view whose rows lie as the legend says.

    Args:
        d_out: [s, ..., D], contiguous.
        x: as in `launch_forward`, as the others.
        weight: likewise.
        cos: likewise.
        sin: likewise.
        eps: likewise.
        zero_centered: likewise.
        d_x: as x.
    """
    if not x.numel():
        return weight.new_zeros(weight.shape, dtype=torch.float32)
    num_rows, tile = tile_of(x)
    blocks = triton.cdiv(num_rows, tile["block_rows"])
    programs = num_programs(blocks, x.device)
    partial = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    view, heads, stride = grouped_rows(d_x)
    if view is not d_x:
        raise ValueError("the gradient must be written where it was asked for, not to a copy.")
    _backward_kernel[(programs,)](
        *_read(x, weight, cos, sin, eps, num_rows), d_out, d_x, heads, stride,
        partial, triton.cdiv(blocks, programs), **_flags(cos, zero_centered), **tile,
    )  # fmt: skip
    return partial.sum(0)


def _read(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, num_rows: int):
    """What both kernels read, in the order of their arguments."""
    rows_per_token = num_rows // x.shape[0]
    return *grouped_rows(x), weight.contiguous(), cos, sin, eps, num_rows, rows_per_token, x.shape[-1]


def _flags(cos: Tensor, zero_centered: bool) -> dict[str, bool | int]:
    return {"half": cos.shape[-1] // 2, "zero_centered": zero_centered}


@triton.jit
def _load_scale(weight, column, mask, zero_centered: tl.constexpr):
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if zero_centered:
        scale += 1.0
    return scale


@triton.jit
def _partner(column, half: tl.constexpr):
    return tl.where(column < half, column + half, column - half)


@triton.jit
def _turn(value, partner, cos, sin, token, column, turned, half: tl.constexpr, back: tl.constexpr):
    """Turn by the token's angles, or back by them; both lie in the table twice, for i and its partner."""
    at = token * 2 * half + column
    cosine = tl.load(cos + at, mask=turned, other=1.0)
    sine = tl.load(sin + at, mask=turned, other=0.0)
    first = column < half
    if back:
        first = column >= half
    return value * cosine + tl.where(first, -partner, partner) * sine


@triton.jit
def _forward_kernel(
    x, x_heads: tl.constexpr, x_stride, weight, cos, sin, eps, num_rows, rows_per_token, dim,
    out, half: tl.constexpr, zero_centered: tl.constexpr, block_rows: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows))[:, None]
    column = tl.arange(0, block_dim)[None, :]
    inside = (row < num_rows) & (column < dim)
    turned = inside & (column < 2 * half)
    other = _partner(column, half)
    value = load_rows(x, x_heads, x_stride, row, column, dim, inside)
    partner = load_rows(x, x_heads, x_stride, row, other, dim, turned)
    rms = tl.rsqrt(tl.sum(value * value, axis=1) / dim + eps)[:, None]
    value *= rms * _load_scale(weight, column, column < dim, zero_centered)
    partner *= rms * _load_scale(weight, other, column < 2 * half, zero_centered)
    value = _turn(value, partner, cos, sin, row // rows_per_token, column, turned, half, False)
    tl.store(out + row * dim + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    x, x_heads: tl.constexpr, x_stride, weight, cos, sin, eps, num_rows, rows_per_token, dim,
    d_out, d_x, d_heads: tl.constexpr, d_stride, partial, blocks_per_program,
    half: tl.constexpr, zero_centered: tl.constexpr, block_rows: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block_dim)[None, :]
    other = _partner(column, half)
    scale = _load_scale(weight, column, column < dim, zero_centered)
    d_weight = tl.zeros([block_rows, block_dim], tl.float32)
    first = tl.program_id(0).to(tl.int64) * blocks_per_program * block_rows
    for block in range(0, blocks_per_program):
        row = (first + block * block_rows + tl.arange(0, block_rows))[:, None]
        inside = (row < num_rows) & (column < dim)
        turned = inside & (column < 2 * half)
        value = load_rows(x, x_heads, x_stride, row, column, dim, inside)
        d = tl.load(d_out + row * dim + column, mask=inside, other=0.0).to(tl.float32)
        d_partner = tl.load(d_out + row * dim + other, mask=turned, other=0.0).to(tl.float32)
        d = _turn(d, d_partner, cos, sin, row // rows_per_token, column, turned, half, True)
        rms = tl.rsqrt(tl.sum(value * value, axis=1) / dim + eps)[:, None]
        value *= rms
        d_weight += d * value
        d *= scale
        along = tl.sum(d * value, axis=1)[:, None] / dim
        at = (row // d_heads) * d_stride + (row % d_heads) * dim + column
        tl.store(d_x + at, ((d - value * along) * rms).to(d_x.dtype.element_ty), mask=inside)
    columns = tl.arange(0, block_dim)
    sums = tl.sum(d_weight, axis=0)
    tl.store(partial + tl.program_id(0) * dim + columns, sums, mask=columns < dim)
