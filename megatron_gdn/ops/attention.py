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

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gdn import cp_layout
from megatron_gdn.rows import Rows

TILE = 256
"""Queries that the torch path handles at once: bounds its memory, and what it computes only to mask."""


def backend_name(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Name of the kernel that runs on such tensors, for people to read."""
    return "FlashAttention-2 (torch)" if _has_flash(device, dtype, head_dim) else "torch"


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


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
    """One block: a square if `rows` is given, else a rectangle. No gradient.

    Args:
        q: [R, m, H, D], any floating dtype, last axis contiguous.
        k: [R, n, h, D].
        v: [R, n, h, D].
        scale: factor on q k^T.
        rows: document borders of the square; None for a rectangle.

    Returns:
        (o [R, m, H, D] in q's dtype or wider, lse [R, H, m] in fp32 or wider, natural logarithm).
    """
    if _has_flash(q.device, q.dtype, q.shape[-1]):
        return _flash_forward(q, k, v, scale, rows)
    return _torch_forward(q, k, v, scale, rows)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block, given the result over all keys of which the block is a part.

    Args:
        do: gradient of the whole result, [R, m, H, D].
        q: as in `forward`; so are k, v, scale and rows.
        k: [R, n, h, D].
        v: [R, n, h, D].
        o: the whole result, over the keys of all blocks, [R, m, H, D] in q's dtype.
        lse: its log-sum-exp, [R, H, m].
        scale: factor on q k^T.
        rows: document borders of the square; None for a rectangle.

    Returns:
        This block's share of (dq, dk, dv), shaped as q, k, v, in their dtype or wider.
    """
    if _has_flash(q.device, q.dtype, q.shape[-1]):
        return _flash_backward(do, q, k, v, o, lse, scale, rows)
    return _torch_backward(do, q, k, v, o, lse, scale, rows)


def merge_(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold the result over further keys into `o` and `lse`, in place.

    Args:
        o: [R, m, H, D], fp32 or wider.
        lse: [R, H, m], fp32 or wider.
        part: result over other keys, [R, m, H, D], any floating dtype.
        part_lse: its log-sum-exp, [R, H, m].
    """
    total = torch.logaddexp(lse, part_lse)
    keep, add = ((x - total).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    o.mul_(keep).add_(part * add)
    lse.copy_(total)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` values are kept in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _tiles(num_queries: int, num_keys: int, rows: Rows | None):
    """(first query, end, first key, end) of each tile: the keys that its queries can reach."""
    for start in range(0, num_queries, TILE):
        end = min(start + TILE, num_queries)
        if rows is None:
            yield start, end, 0, num_keys
        else:
            yield start, end, min(cp_layout.document_start(b, start) for b in rows.borders), end


def _grouped(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[R, t, H, D] to [R, h, G*t, D], so that one product serves all query heads of a key head."""
    return x.to(dtype).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungrouped(x: Tensor, tokens: int) -> Tensor:
    """Inverse of `_grouped`, in x's dtype: [R, h, G*t, D] to [R, t, H, D]."""
    return x.unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, tile: tuple[int, int, int, int], rows: Rows | None) -> Tensor:
    """q k^T of one tile, [R, h, G*t, keys], -inf where a key is out of the query's sight.

    Args:
        q: scaled queries of the tile, [R, h, G*t, D].
        k: keys of the tile, [R, h, keys, D].
        tile: as given by `_tiles`.
        rows: document borders; None if every key is in sight.
    """
    scores = torch.matmul(q, k.transpose(-1, -2))
    if rows is None:
        return scores
    start, end, first_key, end_key = tile
    queries = torch.arange(start, end, device=q.device).unsqueeze(-1)
    keys = torch.arange(first_key, end_key, device=q.device)
    hidden = (keys > queries).expand(rows.num_rows, -1, -1)
    if not rows.whole:
        hidden = hidden | (keys < queries - rows.positions[:, start:end, None])
    # [R, h, G, t, keys] against [R, 1, 1, t, keys]
    scores.unflatten(2, (-1, end - start)).masked_fill_(hidden[:, None, None], float("-inf"))
    return scores


def _torch_forward(q, k, v, scale, rows):
    """Tiles of queries, all heads and rows at once, in fp32."""
    dtype, heads = accumulation_dtype(q.dtype), k.shape[2]
    o = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype)
    k, v = _grouped(k, heads, dtype), _grouped(v, heads, dtype)
    for tile in _tiles(q.shape[1], k.shape[2], rows):
        start, end, first_key, end_key = tile
        scores = _scores(
            _grouped(q[:, start:end], heads, dtype) * scale, k[:, :, first_key:end_key], tile, rows
        )
        weights = scores.softmax(-1)
        # The largest weight is exp(0) / sum: the sum comes without a second exponential.
        tile_lse = scores.amax(-1) - weights.amax(-1).log()
        o[:, start:end] = _ungrouped(torch.matmul(weights, v[:, :, first_key:end_key]), end - start)
        lse[:, :, start:end] = tile_lse.unflatten(2, (-1, end - start)).flatten(1, 2)
    return o, lse


def _torch_backward(do, q, k, v, o, lse, scale, rows):
    """As `_torch_forward`; dS = P * (do v^T - rowsum(do * o))."""
    dtype, heads = accumulation_dtype(q.dtype), k.shape[2]
    dq = q.new_empty(q.shape, dtype=dtype)
    k, v = _grouped(k, heads, dtype), _grouped(v, heads, dtype)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for tile in _tiles(q.shape[1], k.shape[2], rows):
        start, end, first_key, end_key = tile
        q_tile, o_tile, do_tile = (_grouped(x[:, start:end], heads, dtype) for x in (q, o, do))
        k_tile, v_tile, dk_tile, dv_tile = (x[:, :, first_key:end_key] for x in (k, v, dk, dv))
        q_tile = q_tile * scale
        lse_tile = lse[:, :, start:end].unflatten(1, (heads, -1)).flatten(2, 3)
        weights = _scores(q_tile, k_tile, tile, rows).sub_(lse_tile.unsqueeze(-1)).exp_()
        dv_tile += torch.matmul(weights.transpose(-1, -2), do_tile)
        row_sums = (do_tile * o_tile).sum(-1, keepdim=True)
        dscores = torch.matmul(do_tile, v_tile.transpose(-1, -2)).sub_(row_sums).mul_(weights)
        dk_tile += torch.matmul(dscores.transpose(-1, -2), q_tile)
        dq[:, start:end] = _ungrouped(torch.matmul(dscores, k_tile) * scale, end - start)
    return dq, dk.transpose(1, 2), dv.transpose(1, 2)


def _has_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's FlashAttention-2 takes such tensors."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_dim % 8 == 0 and head_dim <= 256


def _flash_lengths(q: Tensor, k: Tensor, rows: Rows | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The kernel's borders of queries and of keys, and the longest of each.

    Borders (the kernel's "varlen": all pieces laid end to end) only where documents cut the rows;
    else the rows are a batch.
    """
    if rows is None or all(len(borders) == 2 for borders in rows.borders):
        return None, None, q.shape[1], k.shape[1]
    if "_longest_piece" not in rows.__dict__:
        rows.__dict__["_longest_piece"] = max(
            b - a for borders in rows.borders for a, b in zip(borders, borders[1:], strict=False)
        )
    longest = rows.__dict__["_longest_piece"]
    return rows.cu_seqlens, rows.cu_seqlens, longest, longest


def _flash_forward(q, k, v, scale, rows):
    """One call of the kernel."""
    num_rows, lengths = q.shape[0], _flash_lengths(q, k, rows)
    varlen = lengths[0] is not None
    if varlen:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    o, lse = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, rows is not None, False, scale=scale
    )[:2]
    if varlen:  # [R*s, H, D] and [H, R*s]
        o, lse = o.unflatten(0, (num_rows, -1)), lse.unflatten(1, (num_rows, -1)).transpose(0, 1)
    return o, lse


def _flash_backward(do, q, k, v, o, lse, scale, rows):
    """One call of the kernel, which reads do, o and lse as if contiguous."""
    num_rows, lengths = q.shape[0], _flash_lengths(q, k, rows)
    varlen = lengths[0] is not None
    if varlen:
        do, q, k, v, o = (x.flatten(0, 1) for x in (do, q, k, v, o))
        lse = lse.transpose(0, 1).flatten(1)
    # The random state of dropout, which is off: asked for and not read.
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    whole = (x.contiguous() for x in (o, lse))
    grads = torch.ops.aten._flash_attention_backward(
        do.contiguous(), q, k, v, *whole, *lengths, 0.0, rows is not None, *unused, scale=scale
    )
    return tuple(grad.unflatten(0, (num_rows, -1)) for grad in grads) if varlen else grads
