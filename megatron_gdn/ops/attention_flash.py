"""Blocks of attention by FlashAttention-2, as torch brings it.

Shapes, results and gradients are those of `ops.attention.forward` and `ops.attention.backward`.
"""

import torch
from torch import Tensor

from megatron_gdn.rows import Rows


def takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel takes such tensors."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_dim % 8 == 0 and head_dim <= 256


def _lengths(q: Tensor, k: Tensor, rows: Rows | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The kernel's borders of queries and of keys, and the longest of each.

    Borders (the kernel's "varlen": all pieces laid end to end) only where documents cut the rows;
    else the rows are a batch.
    """
    if rows is None or not rows.cut:
        return None, None, q.shape[1], k.shape[1]
    return rows.cu_seqlens, rows.cu_seqlens, rows.longest_piece, rows.longest_piece


def forward(q, k, v, scale, rows):
    """One call of the kernel."""
    num_rows, lengths = q.shape[0], _lengths(q, k, rows)
    varlen = lengths[0] is not None
    if varlen:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    o, lse = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, rows is not None, False, scale=scale
    )[:2]
    if varlen:  # [R*s, H, D] and [H, R*s]
        o, lse = o.unflatten(0, (num_rows, -1)), lse.unflatten(1, (num_rows, -1)).transpose(0, 1)
    return o, lse


def backward(do, q, k, v, o, lse, scale, rows):
    """One call of the kernel, which reads do, o and lse as if contiguous."""
    num_rows, lengths = q.shape[0], _lengths(q, k, rows)
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
