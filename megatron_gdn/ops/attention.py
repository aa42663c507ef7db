"""Causal softmax attention in blocks: the one door to its kernels.

Everything that attention needs, on one rank or many, is made of two shapes of work:

* a *square*: rows of tokens on themselves, causal, stopping at the document borders in the rows;
* a *rectangle*: tokens on earlier tokens of the same document, without a mask.

Each gives o = P v and lse = log sum exp(scale q k^T) over its own keys. Results over disjoint keys
merge by their lse; in backward, P = exp(scale q k^T - lse) with the lse over *all* keys gives each
block's share of the gradients on its own.

Source: Dao et al., "FlashAttention" (2022), for lse and the backward.

Legend: R rows, m queries and n keys per row, H query heads, h key/value heads, G = H / h, D head dim.
"""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gdn.ops import attention_cudnn, attention_cudnn_packed, attention_flash, attention_torch
from megatron_gdn.rows import Rows


def backend_name(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Names of the kernels that run on such tensors, for people to read."""
    if not attention_flash.takes(device, dtype, head_dim):
        return "torch"
    if not attention_cudnn.takes(device, dtype, head_dim):
        return "FlashAttention-2 (torch)"
    if attention_cudnn_packed.available():
        return "cuDNN"
    return "cuDNN; packed: FlashAttention-2 (torch), since nvidia-cudnn-frontend is not installed"


def _kernels(q: Tensor, rows: Rows | None, recurs: bool) -> ModuleType:
    """The module whose `forward` and `backward` serve a block."""
    kind = q.device, q.dtype, q.shape[-1]
    if not attention_flash.takes(*kind):
        return attention_torch
    if attention_cudnn.takes(*kind):
        of_one_length = recurs if rows is None else not rows.cut
        if of_one_length and q.shape[1] >= attention_cudnn.MIN_ROW:
            return attention_cudnn
        short = rows is not None and rows.longest_piece < attention_cudnn_packed.MIN_LONGEST
        if attention_cudnn_packed.available() and not short:
            return attention_cudnn_packed
    return attention_flash


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, rows: Rows) -> Tensor:
    """Causal attention of every token to its own document in its row.

    Args:
        q: [R, s, H, D], any floating dtype.
        k: [R, s, h, D]; query head i reads key/value head i // G.
        v: [R, s, h, D].
        scale: factor on q k^T.
        rows: document borders in the rows.

    Returns:
        [R, s, H, D] in q's dtype.
    """
    return _Attention.apply(q, k, v, scale, rows)


class _Attention(torch.autograd.Function):
    """One square, forward and backward."""

    @staticmethod
    def forward(ctx, q, k, v, scale, rows):
        o, lse = forward(q, k, v, scale, rows)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.work = scale, rows
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = backward(do, q, k, v, o, lse, *ctx.work)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, rows: Rows | None = None, *, recurs: bool = False
) -> tuple[Tensor, Tensor]:
    """One block: a square if `rows` is given, else a rectangle. No gradient.

    Args:
        q: [R, m, H, D], any floating dtype, last axis contiguous.
        k: [R, n, h, D].
        v: [R, n, h, D].
        scale: factor on q k^T.
        rows: document borders of the square; None for a rectangle.
        recurs: whether rectangles of this very size come again and again, so that a kernel is worth
            being planned for it; changes speed only.

    Returns:
        (o [R, m, H, D] in q's dtype or wider, lse [R, H, m] in fp32 or wider, natural logarithm).
    """
    return _kernels(q, rows, recurs).forward(q, k, v, scale, rows)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    rows: Rows | None = None,
    *,
    recurs: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block, given the result over all keys of which the block is a part.

    Args:
        do: gradient of the whole result, [R, m, H, D].
        q: as in `forward`; so are k, v, scale, rows and recurs.
        k: [R, n, h, D].
        v: [R, n, h, D].
        o: the whole result, over the keys of all blocks, [R, m, H, D] in q's dtype.
        lse: its log-sum-exp, [R, H, m].
        scale: factor on q k^T.
        rows: document borders of the square; None for a rectangle.
        recurs: see `forward`.

    Returns:
        This block's share of (dq, dk, dv), shaped as q, k, v, in their dtype or wider.
    """
    return _kernels(q, rows, recurs).backward(do, q, k, v, o, lse, scale, rows)


def merge_(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold the result over further keys into `o` and `lse`, in place.

    Args:
        o: [R, m, H, D], fp32 or wider.
        lse: [R, H, m], fp32 or wider.
        part: result over other keys, [R, m, H, D], any floating dtype.
        part_lse: its log-sum-exp, [R, H, m].
    """
    if o.is_cuda and o.dtype == lse.dtype == torch.float32:
        from megatron_gdn.ops.attention_merge import merge_ as merge_at_once_

        merge_at_once_(o, lse, part, part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    keep, add = ((x - total).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    o.mul_(keep).add_(part * add)
    lse.copy_(total)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` values are kept in: fp32, or fp64 for fp64."""
    return attention_torch.sum_dtype(dtype)
