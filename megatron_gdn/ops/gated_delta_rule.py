"""The gated delta rule over rows of tokens: the one door to its kernels.

Per value head, S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T and
o_t = S_t^T q_t / sqrt(K), with q, k l2-normalised, g = -exp(A_log) softplus(a + dt_bias) and
beta = sigmoid(b). A row is an affine map of the state that enters it, X_out = M X_in + S; the pair
[M | S] is the row's *summary*, which is all that another rank needs to know of it.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), for the rule and its chunked (WY) form.

Legend: R rows, s tokens per row, H value heads, h key heads, G = H / h, N chunks of C tokens per row,
K key and V value head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.rows import Rows

CHUNK = 64

StateExchange = Callable[[Tensor], Tensor]
"""Summaries of the local rows [R, H, K, K+V] to the states that enter them [R, H, K, V], fp32."""


def backend_name(device: torch.device, dtype: torch.dtype) -> str:
    """Which kernel runs for tensors of this device and dtype: "fla" or "torch"."""
    return "fla" if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) else "torch"


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    rows: Rows,
    exchange: StateExchange | None = None,
) -> Tensor:
    """Run the rule over every row, state set to zero where a document begins.

    Args:
        q: [R, s, h, K], any floating dtype; not normalised.
        k: [R, s, h, K].
        v: [R, s, H, V]; value head i reads key head i // G.
        a: raw decay gate, [R, s, H].
        b: raw write gate, [R, s, H].
        A_log: [H], fp32.
        dt_bias: [H], fp32.
        rows: document borders in the rows.
        exchange: turns the rows' summaries into the states that enter them; None when every row
            starts with a zero state.

    Returns:
        o, [R, s, H, V] in v's dtype.

    Raises:
        ValueError: value heads are no multiple of key heads.

    Communication: none but what `exchange` does, called once.
    """
    if v.shape[2] % q.shape[2]:
        raise ValueError(
            f"--linear-num-value-heads must be a multiple of --linear-num-key-heads; "
            f"this rank has {v.shape[2]} and {q.shape[2]}."
        )
    run = _fla_rule if backend_name(v.device, v.dtype) == "fla" else _torch_rule
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return run(q, k, v, g, b.float().sigmoid(), rows, exchange)


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


def _l2norm(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _to_chunks(x: Tensor, chunk: int, groups: int) -> Tensor:
    """[R, s, H, D] to [R, H/groups, groups, N, C, D], zeros after the row's last token."""
    num_rows, row_len, heads, dim = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, -row_len % chunk))
    x = x.reshape(num_rows, -1, chunk, heads // groups, groups, dim)
    return x.permute(0, 3, 4, 1, 2, 5)


def _torch_rule(q, k, v, g, beta, rows, exchange):
    """Chunked form in fp32: all chunks at once, then one short product per chunk for the state."""
    num_rows, row_len, heads, _ = v.shape
    groups, dtype = heads // q.shape[2], v.dtype
    q = _to_chunks(_l2norm(q) * q.shape[-1] ** -0.5, CHUNK, 1)
    k = _to_chunks(_l2norm(k), CHUNK, 1)
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


def _fla_rule(q, k, v, g, beta, rows, exchange):
    """flash-linear-attention's Triton kernels, all pieces of all rows in one call.

    Gates are made here and every argument is one that fla's signature names: what it does not know, its
    `**kwargs` would swallow.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def laid_out(x):
        return x.flatten(0, 1).unsqueeze(0).contiguous()

    state = None
    if exchange is not None:
        entering = exchange(_fla_summaries(q, k, v, g, beta, rows))
        pieces = rows.cu_seqlens_cpu.numel() - 1
        state = entering.new_zeros(pieces, *entering.shape[1:]).index_copy(0, rows.first_pieces, entering)
    out, _ = chunk_gated_delta_rule(
        q=laid_out(q),
        k=laid_out(k),
        v=laid_out(v),
        g=laid_out(g),
        beta=laid_out(beta),
        initial_state=state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=rows.cu_seqlens,
        cu_seqlens_cpu=rows.cu_seqlens_cpu,
    )
    return out.view_as(v)


def _fla_summaries(q, k, v, g, beta, rows):
    """[M | S] of every row, [R, H, K, K + V] fp32: the rule run on V' = K + V value channels.

    Started from [I | 0], with zeros for the first K values of every token, it ends in [M | S].
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def tails(x):
        ends = [row[borders[-2] :] for row, borders in zip(x, rows.borders, strict=True)]
        return torch.cat(ends).unsqueeze(0)

    heads, key_dim = v.shape[2], k.shape[3]
    start = torch.eye(key_dim, key_dim + v.shape[3], device=v.device)
    _, summaries = chunk_gated_delta_rule(
        q=tails(q),
        k=tails(k),
        v=F.pad(tails(v), (key_dim, 0)),
        g=tails(g),
        beta=tails(beta),
        initial_state=start.expand(rows.num_rows, heads, -1, -1).contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=rows.tails.cu_seqlens,
        cu_seqlens_cpu=rows.tails.cu_seqlens_cpu,
    )
    m, s = summaries.tensor_split([key_dim], dim=-1)
    return torch.cat([m * rows.inside.view(-1, 1, 1, 1), s], dim=-1)
