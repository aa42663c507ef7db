"""Sums of chosen rows, which both bring tokens to their experts and add up what the experts give."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def sum_rows(x: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
    """out[i] = x[rows[i, 0]] + x[rows[i, 1]] + ..., added in this order in fp32, rounded once.

    With one column this is a choice of rows. The gradient is the same operation with `rows` and `inverse`
    exchanged, so that nothing is added up by atomics: results do not change from run to run.

    Args:
        x: [N, D], any floating dtype.
        rows: [M, K], int64, each in 0 .. N-1.
        inverse: [N, L], int64: the i whose sums row n of `x` is part of, L = M * K / N of them for every n.

    Returns:
        [M, D] in x's dtype.
    """
    return _SumRows.apply(x, rows, inverse)


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, inverse)
        return _sum_rows(x, rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, inverse = ctx.saved_tensors
        return _SumRows.apply(grad.contiguous(), inverse, rows), None, None


def _sum_rows(x: Tensor, rows: Tensor) -> Tensor:
    if not x.is_cuda:
        total = x.index_select(0, rows[:, 0]).to(torch.promote_types(x.dtype, torch.float32))
        for column in rows.t()[1:]:
            total += x.index_select(0, column)
        return total.to(x.dtype)
    out = x.new_empty(rows.shape[0], x.shape[1])
    launch_sum_rows(x, rows, out)
    return out


def launch_sum_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """The Triton kernel: one program for each row of `out` and each `block` of its columns."""
    (num_rows, num_terms), width = rows.shape, x.shape[1]
    block = min(triton.next_power_of_2(max(width, 1)), 2048)
    if out.numel():
        grid = (num_rows, triton.cdiv(width, block))
        _sum_rows_kernel[grid](x, rows, out, width, num_terms, block, num_warps=8 if block > 1024 else 4)


@triton.jit
def _sum_rows_kernel(x, rows, out, width, num_terms: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros([block], tl.float32)
    for term in tl.static_range(num_terms):
        source = tl.load(rows + row * num_terms + term)
        total += tl.load(x + source * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)
