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
        o, lse = ops.forward(q, k, v, scale, plan.local_rows)
        o = o.to(ops.accumulation_dtype(q.dtype))
        q_spans, o_spans, lse_spans = (_by_span(x, plan) for x in (q, o, lse))
        for ranges, kv, _ in exchange(_stack(k, v, plan), None, plan, cp_group):
            for span, length, keys in rectangles(plan, ranges):
                part, part_lse = ops.forward(
                    q_spans[span][:, :length], *kv[keys].permute(1, 2, 0, 3, 4), scale
                )
                ops.merge_(o_spans[span][:, :length], lse_spans[span][:, :, :length], part, part_lse)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.work = plan, scale, cp_group, exchange
        return plan.from_rows(o)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        plan, scale, cp_group, exchange = ctx.work
        do = plan.to_rows(do)
        dq, dk, dv = ops.backward(do, q, k, v, o, lse, scale, plan.local_rows)
        sums = ops.accumulation_dtype(q.dtype)
        dq, dkv = dq.to(sums), _stack(dk, dv, plan).to(sums)
        whole = tuple(_by_span(x, plan) for x in (do, q, o))
        dq_spans, lse_spans = _by_span(dq, plan), _by_span(lse, plan)
        for ranges, kv, dkv_sum in exchange(_stack(k, v, plan), dkv, plan, cp_group):
            for span, length, keys in rectangles(plan, ranges):
                do_part, q_part, o_part = (x[span][:, :length] for x in whole)
                k_part, v_part = kv[keys].permute(1, 2, 0, 3, 4)
                dq_part, dk_part, dv_part = ops.backward(
                    do_part, q_part, k_part, v_part, o_part, lse_spans[span][:, :, :length], scale
                )
                dq_spans[span][:, :length] += dq_part
                dkv_sum[keys, 0] += dk_part.transpose(0, 1)
                dkv_sum[keys, 1] += dv_part.transpose(0, 1)
        dk, dv = (x.to(k.dtype) for x in dkv.unbind(1))
        return plan.from_rows(dq).to(q.dtype), dk, dv, None, None, None, None


class Rectangle(NamedTuple):
    """Queries at the start of a local span against earlier keys of their document."""

    span: int
    """Local span, in buffer order."""
    length: int
    """Queries, from the span's first token on."""
    keys: slice
    """Their keys in the buffer of keys."""


def rectangles(plan: StreamPlan, key_ranges: Ranges) -> Iterator[Rectangle]:
    """What this rank's spans have to do with keys at stream positions `key_ranges`, squares left out."""
    for span, (start, end) in enumerate(plan.ranges):
        border = bisect_right(plan.cu_seqlens, start)
        document_start, document_end = plan.cu_seqlens[border - 1], plan.cu_seqlens[border]
        offset = 0
        for keys_start, keys_end in key_ranges:
            first, last = max(document_start, keys_start), min(start, keys_end)
            if first < last:
                keys = slice(offset + first - keys_start, offset + last - keys_start)
                yield Rectangle(span, min(document_end, end) - start, keys)
            offset += keys_end - keys_start


Exchange = Callable[
    [Tensor, Tensor | None, StreamPlan, ProcessGroup], Iterator[tuple[Ranges, Tensor, Tensor | None]]
]
"""Brings other ranks' keys and values here, buffer by buffer.

Given this rank's keys and values [s, 2, B, h, D] and, in backward, the sum of their gradients so far, of
the same shape. Yields (stream positions of the buffer, keys and values [.., 2, B, h, D], and in backward
a tensor of the same shape to add gradients to). After the last buffer, all that any rank has added for
this rank's keys and values is in the given sum.
"""


def gathered(
    kv: Tensor, dkv: Tensor | None, plan: StreamPlan, cp_group: ProcessGroup
) -> Iterator[tuple[Ranges, Tensor, Tensor | None]]:
    """All keys and values as one buffer in stream order.

    Communication: one all-gather of s*B*2*h*D elements per rank; in backward the same once more, and
    one reduce-scatter of their gradients in fp32.
    """
    whole = plan.to_stream(cp_comm.all_gather(kv, cp_group))
    dwhole = None if dkv is None else dkv.new_zeros(whole.shape)
    yield ((0, plan.seq_len),), whole, dwhole
    if dkv is not None:
        dkv += cp_comm.reduce_scatter(plan.to_stacked(dwhole), cp_group)


def circled(
    kv: Tensor, dkv: Tensor | None, plan: StreamPlan, cp_group: ProcessGroup
) -> Iterator[tuple[Ranges, Tensor, Tensor | None]]:
    """Each rank's keys and values in turn, skipping turns in which no rank has anything to do.

    Communication: one ring shift of s*B*2*h*D elements for each of `ring_steps`; in backward the same
    once more, and as many shifts of the gradients in fp32.
    """
    yield plan.ranges, kv, dkv
    at, dvisitor = 0, None
    for step in ring_steps(plan):
        kv = cp_comm.ring_shift(kv, cp_group, step - at)
        if dkv is not None:
            dvisitor = torch.zeros_like(dkv) if at == 0 else cp_comm.ring_shift(dvisitor, cp_group, step - at)
        at = step
        owner = (plan.cp_rank - step) % plan.cp_size
        yield cp_layout.local_ranges(plan.layout, plan.cp_size, owner, plan.seq_len), kv, dvisitor
    if dvisitor is not None:
        dkv += cp_comm.ring_shift(dvisitor, cp_group, plan.cp_size - at)


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
