"""Softmax attention over a stream that the context-parallel ranks share.

Every rank has the queries of its own spans and needs the keys and values of all earlier tokens of
the same documents. Each span's own tokens are one causal square; what comes before the span is a
rectangle, or several, of the one document that lies across the span's start. Keys and values come to
the rank in one of two ways:

* `all_gather`: all at once, so that each span has at most one rectangle;
* `p2p`: rank by rank in a circle, so that memory does not grow with the ranks.

Partial results merge by log-sum-exp in fp32; gradients of keys and values are summed in fp32.

Source: Liu et al., "Ring Attention" (2023), for the circle; Grattafiori et al., "The Llama 3 Herd of
Models" (2024), section 3.3.2, for the gather.

Legend: S tokens of the stream, s of this rank, B batch, H query heads, h key/value heads, D head dim,
R rows (spans x batch, span-major).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_gdn import cp_comm, cp_layout
from megatron_gdn.ops import attention as ops
from megatron_gdn.stream import StreamPlan

Ranges = tuple[tuple[int, int], ...]
"""(start, end) stream positions of the spans in a buffer, in buffer order."""


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
        cp_comm_type: a key of `EXCHANGES`.

    Returns:
        [s, B, H, D] in q's dtype.

    Communication: that of the exchange, see `gathered` and `circled`.
    """
    return _ContextParallelAttention.apply(
        q_sBHD, k_sBhD, v_sBhD, plan, scale, cp_group, EXCHANGES[cp_comm_type]
    )


class _ContextParallelAttention(torch.autograd.Function):
    """Keeps q, k, v, o and lse; backward fetches the others' keys and values once more."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale, cp_group, exchange):
        q, k, v = (plan.to_rows(x) for x in (q, k, v))
        buffers = exchange(_stack(k, v, plan), None, plan, cp_group)
        next(buffers)  # the exchange begins
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
        ctx.work = plan, scale, cp_group, exchange
        return plan.from_rows(o)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        plan, scale, cp_group, exchange = ctx.work
        work = _Backward(plan.to_rows(do), q, k, v, o, lse, plan, scale)
        for buffer in exchange(work.kv, work.dkv, plan, cp_group):
            if buffer is None:
                work.add_square()
            else:
                work.add_rectangles(*buffer)
        return *work.gradients(), None, None, None, None


class _Backward:
    """Gradients in the making, over all blocks of this rank's queries."""

    def __init__(self, do, q, k, v, o, lse, plan: StreamPlan, scale: float):
        self.do, self.q, self.o, self.lse = (_by_span(x, plan) for x in (do, q, o, lse))
        self.kv = _stack(k, v, plan)
        self.dkv = torch.zeros_like(self.kv, dtype=ops.accumulation_dtype(q.dtype))
        self.plan, self.scale = plan, scale
        self.squares_left = list(range(len(plan.ranges)))
        self.dq_squares, self.dq_sums = {}, {}

    def add_square(self) -> None:
        """One span's own tokens: work that needs nothing of other ranks, if any is left."""
        if not self.squares_left:
            return
        span = self.squares_left.pop()
        start, end = span * self.plan.span_len, (span + 1) * self.plan.span_len
        k, v = self.kv[start:end].permute(1, 2, 0, 3, 4)
        dq, dk, dv = ops.backward(
            self.do[span], self.q[span], k, v, self.o[span], self.lse[span], self.scale,
            self.plan.span_rows[span],
        )  # fmt: skip
        self.dq_squares[span] = dq
        _add(self.dkv[start:end], dk, dv)

    def add_rectangles(self, ranges: Ranges, kv: Tensor, dkv: Tensor) -> None:
        """All queries that reach into one buffer of keys, see `Exchange`."""
        for span, length, keys, recurs in rectangles(self.plan, ranges):
            do, q, o = (x[span][:, :length] for x in (self.do, self.q, self.o))
            k, v = kv[keys].permute(1, 2, 0, 3, 4)
            lse = self.lse[span][:, :, :length]
            dq, dk, dv = ops.backward(do, q, k, v, o, lse, self.scale, recurs=recurs)
            if span in self.dq_sums:
                self.dq_sums[span].add_(dq)
            else:
                self.dq_sums[span] = dq.to(dkv.dtype)
            _add(dkv[keys], dk, dv)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the plan's order, after the last buffer."""
        while self.squares_left:
            self.add_square()
        for span, dq in self.dq_sums.items():
            self.dq_squares[span][:, : dq.shape[1]] += dq
        dq = torch.cat([self.dq_squares[span] for span in range(len(self.plan.ranges))])
        dk, dv = (x.to(self.kv.dtype) for x in self.dkv.unbind(1))
        return self.plan.from_rows(dq).to(self.q.dtype), dk, dv


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


Buffer = tuple[Ranges, Tensor, Tensor | None]
"""(Stream positions of the keys, keys and values [.., 2, B, h, D], and in backward a tensor of the same
shape to add their gradients to)."""

Exchange = Callable[[Tensor, Tensor | None, StreamPlan, ProcessGroup], Iterator[Buffer | None]]
"""Brings other ranks' keys and values here, buffer by buffer.

Given this rank's keys and values [s, 2, B, h, D] and, in backward, the sum of their gradients so far, of
the same shape. Yields None once it has begun, then every buffer, and in backward None again while
gradients come home: at None there is time for work that needs nothing of others. In the end, all that any
rank has added for this rank's keys and values is in the given sum.
"""


def gathered(
    kv: Tensor, dkv: Tensor | None, plan: StreamPlan, cp_group: ProcessGroup
) -> Iterator[Buffer | None]:
    """All keys and values as one buffer in stream order.

    Communication: one all-gather of s*B*2*h*D elements per rank; in backward the same once more, and
    one reduce-scatter of their gradients in fp32.
    """
    arrival = cp_comm.start_all_gather(kv, cp_group)
    yield None
    whole = plan.to_stream(arrival.wait())
    dwhole = None if dkv is None else dkv.new_zeros(whole.shape)
    yield ((0, plan.seq_len),), whole, dwhole
    if dkv is not None:
        arrival = cp_comm.start_reduce_scatter(plan.to_stacked(dwhole), cp_group)
        yield None
        dkv += arrival.wait()


def circled(
    kv: Tensor, dkv: Tensor | None, plan: StreamPlan, cp_group: ProcessGroup
) -> Iterator[Buffer | None]:
    """Each rank's keys and values in turn, skipping turns in which no rank has anything to do.

    The next turn's keys and the last turn's gradients travel while this turn is worked on.

    Communication: one ring shift of s*B*2*h*D elements for each of `ring_steps`; in backward the same
    once more, and as many shifts of the gradients in fp32.
    """
    steps = ring_steps(plan)
    hops = [after - before for before, after in pairwise((0, *steps, plan.cp_size))]
    arrival, dvisitor = cp_comm.start_ring_shift(kv, cp_group, hops[0]) if steps else None, None
    yield None
    yield plan.ranges, kv, dkv
    for turn, step in enumerate(steps, start=1):
        kv = arrival.wait()
        if turn < len(steps):
            arrival = cp_comm.start_ring_shift(kv, cp_group, hops[turn])
        dkv_here = None if dkv is None else torch.zeros_like(dkv)
        owner = (plan.cp_rank - step) % plan.cp_size
        yield cp_layout.local_ranges(plan.layout, plan.cp_size, owner, plan.seq_len), kv, dkv_here
        if dkv is not None:
            if dvisitor is not None:
                dkv_here += dvisitor.wait()
            dvisitor = cp_comm.start_ring_shift(dkv_here, cp_group, hops[turn])
    if dvisitor is not None:
        yield None
        dkv += dvisitor.wait()


EXCHANGES: dict[str, Exchange] = {"all_gather": gathered, "p2p": circled}
"""By the host's word for it, `cp_comm_type`."""


def ring_steps(plan: StreamPlan) -> tuple[int, ...]:
    """How far round the circle keys must travel for some rank to need them: equal on every rank.

    All of 1 .. cp - 1 when a document covers the stream; none when every span starts a document.
    """
    if "_ring_steps" not in plan.__dict__:
        rank_of = [
            cp_layout.span_holder(plan.layout, plan.cp_size, span)[0]
            for span in range(plan.seq_len // plan.span_len)
        ]
        steps = set()
        for span, rank in enumerate(rank_of):
            document_start = cp_layout.document_start(plan.cu_seqlens, span * plan.span_len)
            needed = rank_of[document_start // plan.span_len : span]
            steps |= {(rank - owner) % plan.cp_size for owner in needed}
        plan.__dict__["_ring_steps"] = tuple(sorted(steps - {0}))
    return plan.__dict__["_ring_steps"]


def _by_span(x: Tensor, plan: StreamPlan) -> Tensor:
    """[R, ...] as a view [spans, B, ...]."""
    return x.unflatten(0, (-1, plan.batch))


def _stack(k: Tensor, v: Tensor, plan: StreamPlan) -> Tensor:
    """Rows [R, span_len, h, D] of keys and of values to [s, 2, B, h, D], which travels as one."""
    return torch.stack([plan.from_rows(k), plan.from_rows(v)], dim=1)


def _add(dkv: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add gradients [B, n, h, D] of keys and of values to their sums [n, 2, B, h, D]."""
    for total, part in zip(dkv.unbind(1), (dk, dv), strict=True):
        total += part.transpose(0, 1)
