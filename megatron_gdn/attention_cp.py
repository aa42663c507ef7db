"""Softmax attention over a stream that the context-parallel ranks share.

Every rank has the queries of its own spans and needs the keys and values of earlier tokens of the
same documents. Each span's own tokens are one causal square; what comes before the span is a rectangle,
or several, of the one document that lies across the span's start. Only the keys and values of that
document are sent, straight from the rank that holds them, see `attention_keys`.

Partial results merge by log-sum-exp in fp32; gradients of keys and values are summed in fp32. What
travels does so while blocks that do not need it are worked on.

Source: Liu et al., "Ring Attention" (2023), for blocks that merge; Grattafiori et al., "The Llama 3 Herd
of Models" (2024), section 3.3.2, for fetching all keys at once.

Legend: s tokens of this rank, B batch, H query heads, h key/value heads, D head dim, R rows
(spans x batch, span-major).
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_gdn.attention_keys import KeySums, Ranges, fetch_keys, key_turns
from megatron_gdn.ops import attention as ops
from megatron_gdn.stream import StreamPlan


def context_parallel_attention(
    q_sBHD: Tensor,
    k_sBhD: Tensor,
    v_sBhD: Tensor,
    plan: StreamPlan,
    scale: float,
    cp_group: ProcessGroup,
    cp_comm_type: str,
) -> Tensor:
    """Causal attention inside documents, over the tokens of all ranks.

    Args:
        q_sBHD: [s, B, H, D], any floating dtype, tokens in the plan's layout.
        k_sBhD: [s, B, h, D]; query head i reads key/value head i // (H / h).
        v_sBhD: [s, B, h, D].
        plan: layout, spans and documents of the microbatch.
        scale: factor on q k^T.
        cp_group: ranks sharing the stream, more than one.
        cp_comm_type: one of `validation.CP_COMM_TYPES`.

    Returns:
        [s, B, H, D] in q's dtype.

    Communication: see `attention_keys.fetch_keys`.
    """
    return _ContextParallelAttention.apply(q_sBHD, k_sBhD, v_sBhD, plan, scale, cp_group, cp_comm_type)


class _ContextParallelAttention(torch.autograd.Function):
    """Keeps q, k, v, o and lse; backward fetches the others' keys and values once more."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale, cp_group, cp_comm_type):
        q, k, v = (plan.to_rows(x) for x in (q, k, v))
        buffers = fetch_keys(k, v, None, plan, key_turns(plan, cp_comm_type), cp_group)
        next(buffers)  # the first exchange begins
        o, lse = ops.forward(q, k, v, scale, plan.local_rows)
        q_spans, o_spans, lse_spans = (_by_span(x, plan) for x in (q, o, lse))
        sums = {}  # of spans that a document lies across the start of: its tokens' results so far
        for ranges, kv, _ in buffers:
            for span, length, keys, recurs in rectangles(plan, ranges):
                k_part, v_part = kv[keys].permute(1, 2, 0, 3, 4)
                part = ops.forward(q_spans[span][:, :length], k_part, v_part, scale, recurs=recurs)
                if span not in sums:
                    sums[span] = o_spans[span][:, :length].to(ops.accumulation_dtype(o.dtype))
                ops.merge_(sums[span], lse_spans[span][:, :, :length], *part)
        for span, merged in sums.items():
            o_spans[span][:, : merged.shape[1]] = merged
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.work = plan, scale, cp_group, cp_comm_type
        return plan.from_rows(o)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        plan, scale, cp_group, cp_comm_type = ctx.work
        work = _Backward(plan.to_rows(do), *ctx.saved_tensors, plan, scale)
        turns = key_turns(plan, cp_comm_type)
        for buffer in fetch_keys(work.k, work.v, work.key_sums, plan, turns, cp_group):
            if buffer is None:
                work.add_square()
            else:
                work.add_rectangles(*buffer)
        return *work.gradients(), None, None, None, None


class _Backward:
    """Gradients in the making, over all blocks of this rank's queries."""

    def __init__(self, do, q, k, v, o, lse, plan: StreamPlan, scale: float):
        self.do, self.q, self.k, self.v, self.o, self.lse = do, q, k, v, o, lse
        self.plan, self.scale = plan, scale
        self.key_sums = KeySums(plan, ops.accumulation_dtype(k.dtype))
        self.query_sums: dict[int, Tensor] = {}
        # Whole spans one by one, so that one is left for when gradients travel; pieces all at once.
        rows = plan.batch
        if plan.local_rows.cut:
            self.squares = [(slice(None), plan.local_rows)]
        else:
            self.squares = [(slice(i * rows, (i + 1) * rows), span) for i, span in enumerate(plan.span_rows)]
        self.squares_done: list[tuple[Tensor, Tensor, Tensor]] = []

    def add_square(self) -> None:
        """Local tokens on themselves: work that needs nothing of other ranks, if any is left."""
        if len(self.squares_done) < len(self.squares):
            part, rows = self.squares[len(self.squares_done)]
            parts = (x[part] for x in (self.do, self.q, self.k, self.v, self.o, self.lse))
            self.squares_done.append(ops.backward(*parts, self.scale, rows))

    def add_rectangles(self, ranges: Ranges, kv: Tensor, dkv: Tensor) -> None:
        """All queries that look back at one buffer of keys, see `fetch_keys`."""
        spans = [_by_span(x, self.plan) for x in (self.do, self.q, self.o, self.lse)]
        for span, length, keys, recurs in rectangles(self.plan, ranges):
            do, q, o = (x[span][:, :length] for x in spans[:3])
            k, v = kv[keys].permute(1, 2, 0, 3, 4)
            lse = spans[3][span][:, :, :length]
            dq, dk, dv = ops.backward(do, q, k, v, o, lse, self.scale, recurs=recurs)
            if span in self.query_sums:
                self.query_sums[span].add_(dq)
            else:
                self.query_sums[span] = dq.to(dkv.dtype)
            dkv[keys, 0] += dk.transpose(0, 1)
            dkv[keys, 1] += dv.transpose(0, 1)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the plan's order, after the last buffer."""
        while len(self.squares_done) < len(self.squares):
            self.add_square()
        done = zip(*self.squares_done, strict=True)
        dq, dk, dv = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in done)
        dq_spans = _by_span(dq, self.plan)
        for span, total in self.query_sums.items():
            dq_spans[span][:, : total.shape[1]] += total
        self.key_sums.add_to(_by_span(dk, self.plan), _by_span(dv, self.plan))
        return tuple(self.plan.from_rows(x).to(self.q.dtype) for x in (dq, dk, dv))


class Rectangle(NamedTuple):
    """Queries at the start of a local span against earlier keys of their document."""

    span: int
    """Local span, in buffer order."""
    length: int
    """Queries, from the span's first token on."""
    keys: slice
    """Their keys in the buffer of keys."""
    recurs: bool
    """Whether other microbatches have rectangles of this size: whole spans, or the most keys at once."""


KEYS_AT_ONCE = 65536
"""Keys of one rectangle: bounds what kernels allocate, which in backward is several times the keys."""


def rectangles(plan: StreamPlan, key_ranges: Ranges) -> Iterator[Rectangle]:
    """What this rank's spans have to do with keys at stream positions `key_ranges`, squares left out."""
    for span, (start, end) in enumerate(plan.ranges):
        border = bisect_right(plan.cu_seqlens, start)
        document_start, document_end = plan.cu_seqlens[border - 1], plan.cu_seqlens[border]
        length, offset = min(document_end, end) - start, 0
        for keys_start, keys_end in key_ranges:
            last = min(start, keys_end)
            while last > max(document_start, keys_start):
                first = max(document_start, keys_start, last - KEYS_AT_ONCE)
                whole = (last - first) % plan.span_len == 0 or last - first == KEYS_AT_ONCE
                keys = slice(offset + first - keys_start, offset + last - keys_start)
                yield Rectangle(span, length, keys, whole and length == plan.span_len)
                last = first
            offset += keys_end - keys_start


def _by_span(x: Tensor, plan: StreamPlan) -> Tensor:
    """[R, ...] as a view [spans, B, ...]."""
    return x.unflatten(0, (-1, plan.batch))
