"""The gated delta rule in plain torch, fp32 inside: for CPUs, fp32 tensors and heads of any size.

Legend as in `gated_delta_rule`, and N chunks of C tokens per row, G value heads per key head.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), for the chunked (WY) form.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.rows import Rows, StateExchange

CHUNK = 64


@dataclass(frozen=True)
class _Borders:
    """Document borders inside chunks, as 0/1 masks shared by all heads and layers."""

    earlier: Tensor
    """Token j < i of the same document, [R, 1, 1, N, C, C], bool."""
    continues: Tensor
    """The document entered the chunk from before it, [R, 1, 1, N, C, 1], fp32."""
    leaves: Tensor
    """The document is the one at the chunk's end, [R, 1, 1, N, C, 1], fp32."""


def _borders(rows: Rows, chunk: int) -> _Borders:
    """Masks of `rows`, made on first use and kept with them."""
    cache = rows.__dict__.setdefault("_chunk_borders", {})
    if chunk not in cache:
        starts = (rows.positions == 0).long()
        starts = F.pad(starts, (0, -rows.row_len % chunk)).reshape(rows.num_rows, 1, 1, -1, chunk)
        # Counted inside the chunk: 0 means that no document has begun in it yet.
        document = starts.cumsum(-1)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        cache[chunk] = _Borders(
            same & same.new_ones(chunk, chunk).tril(-1),
            (document == 0).float().unsqueeze(-1),
            (document == document[..., -1:]).float().unsqueeze(-1),
        )
    return cache[chunk]


def _to_chunks(x: Tensor, chunk: int, groups: int) -> Tensor:
    """[R, s, H, D] to [R, H/groups, groups, N, C, D], zeros after the row's last token."""
    num_rows, row_len, heads, dim = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, -row_len % chunk))
    x = x.reshape(num_rows, -1, chunk, heads // groups, groups, dim)
    return x.permute(0, 3, 4, 1, 2, 5)


def run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, exchange: StateExchange | None
) -> Tensor:
    """Chunked form in fp32: all chunks at once, then one short product per chunk for the state.

    Args and result as for `gated_delta_rule`, but with g (log decay) and beta, [R, s, H] fp32.
    """
    num_rows, row_len, heads, _ = v.shape
    groups, dtype = heads // q.shape[2], v.dtype
    q = _to_chunks(q.float() * q.shape[-1] ** -0.5, CHUNK, 1)
    k = _to_chunks(k.float(), CHUNK, 1)
    v = _to_chunks(v.float(), CHUNK, groups)
    g, beta = (_to_chunks(x.unsqueeze(-1), CHUNK, groups) for x in (g, beta))
    borders = _borders(rows, CHUNK)

    # Decay from the later of (chunk start, document start) to each token, between tokens, and from each
    # token to the chunk's end. Each exponent is the sum over just its own tokens, never a difference of
    # two longer sums: where decay is strong, their rounding would drown the true gradient of g.
    identity = torch.eye(CHUNK, device=g.device)
    lower = torch.ones_like(identity).tril()
    earlier = borders.earlier.to(g.dtype)
    decay = torch.matmul(earlier + identity, g)
    before = torch.matmul(lower, g * lower.tril(-1)).masked_fill(~borders.earlier, float("-inf")).exp()
    from_start = decay.exp() * borders.continues
    to_end = torch.matmul(earlier.transpose(-1, -2), g).exp() * borders.leaves

    # (I + A) U = beta (V - from_start K X_in) gives what each token writes: U = U_0 - W X_in.
    system = torch.matmul(k, k.transpose(-1, -2)) * before * beta
    right = torch.cat([beta * v, (beta * from_start) * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    writes, erases = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    # The chunk as an affine map of its state, X_out = transfer X_in + update.
    keys_to_end = (k * to_end).transpose(-1, -2)
    update = torch.matmul(keys_to_end, writes)
    transfer = from_start[..., -1:, :] * torch.eye(k.shape[-1], device=k.device)
    transfer = transfer - torch.matmul(keys_to_end, erases)

    states = _chunk_states(transfer, update, exchange)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (before + identity)
    out = torch.matmul(q * from_start - torch.matmul(scores, erases), states) + torch.matmul(scores, writes)
    out = out.permute(0, 3, 4, 1, 2, 5).reshape(num_rows, -1, heads, v.shape[-1])
    return out[:, :row_len].to(dtype)


def _chunk_states(transfer: Tensor, update: Tensor, exchange: StateExchange | None) -> Tensor:
    """State that enters every chunk, [R, h, G, N, K, V], from the chunks' affine maps."""
    transfers, updates = transfer.unbind(3), update.unbind(3)
    state = torch.zeros_like(updates[0])
    if exchange is not None:
        identity = torch.eye(transfer.shape[-1], device=transfer.device).expand_as(transfers[0])
        summary = torch.cat([identity, state], dim=-1)
        padding = (transfer.shape[-1], 0)
        for m, s in zip(transfers, updates, strict=True):
            summary = torch.matmul(m, summary) + F.pad(s, padding)
        state = exchange(summary.flatten(1, 2)).view_as(state)
    states = []
    for m, s in zip(transfers, updates, strict=True):
        states.append(state)
        state = torch.matmul(m, state) + s
    return torch.stack(states, dim=3)
