"""Blocks of attention in plain torch, on any device and in any dtype: tiles of queries in fp32.

Shapes, results and gradients are those of `ops.attention.forward` and `ops.attention.backward`.

Legend: as in `ops.attention`; t queries of a tile.
"""

import torch
from torch import Tensor

from megatron_gdn import cp_layout
from megatron_gdn.rows import Rows

TILE = 256
"""Queries handled at once: bounds the memory, and what is computed only to be masked."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
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


def forward(q, k, v, scale, rows):
    """o and lse of a block, all heads and rows of a tile at once."""
    dtype, heads = sum_dtype(q.dtype), k.shape[2]
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


def backward(do, q, k, v, o, lse, scale, rows):
    """As `forward`; dS = P * (do v^T - rowsum(do * o))."""
    dtype, heads = sum_dtype(q.dtype), k.shape[2]
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
