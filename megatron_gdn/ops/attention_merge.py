"""The merge of two partial results of attention in one pass over memory, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge(
    o,
    lse,
    part,
    part_lse,
    tokens,
    head_dim,
    o_row,
    o_token,
    o_head,
    lse_row,
    lse_head,
    lse_token,
    part_row,
    part_token,
    part_head,
    part_lse_row,
    part_lse_head,
    part_lse_token,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One head of TOKENS tokens of a row."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = token < tokens
    cells = there[:, None] & (column < head_dim)[None, :]

    lse_at = lse + row * lse_row + head * lse_head + token * lse_token
    part_lse_at = part_lse + row * part_lse_row + head * part_lse_head + token * part_lse_token
    old = tl.load(lse_at, mask=there, other=0.0)
    new = tl.load(part_lse_at, mask=there, other=0.0)
    larger = tl.maximum(old, new)
    old_weight, new_weight = tl.exp(old - larger), tl.exp(new - larger)
    total = old_weight + new_weight

    o_at = o + row * o_row + head * o_head + token[:, None] * o_token + column[None, :]
    part_at = part + row * part_row + head * part_head + token[:, None] * part_token + column[None, :]
    old_o = tl.load(o_at, mask=cells, other=0.0)
    new_o = tl.load(part_at, mask=cells, other=0.0).to(tl.float32)
    merged = old_o * (old_weight / total)[:, None] + new_o * (new_weight / total)[:, None]
    tl.store(o_at, merged, mask=cells)
    tl.store(lse_at, larger + tl.log(total), mask=there)


def merge_(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """As `ops.attention.merge_`, for fp32 `o` and `lse`; the last axis of `o` and `part` is contiguous."""
    rows, tokens, heads, head_dim = o.shape
    width = triton.next_power_of_2(head_dim)
    block = max(1, 4096 // width)
    with torch.cuda.device_of(o):
        _merge[(triton.cdiv(tokens, block), heads, rows)](
            o,
            lse,
            part,
            part_lse,
            tokens,
            head_dim,
            *o.stride()[:3],
            *lse.stride(),
            *part.stride()[:3],
            *part_lse.stride(),
            TOKENS=block,
            WIDTH=width,
        )
