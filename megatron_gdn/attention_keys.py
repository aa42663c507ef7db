"""How the keys and values that a context-parallel rank looks back at reach it, and their gradients return.

Which those are, every rank knows from the plan: of each document that lies across the start of a span,
what came before the span. They go straight from the rank that holds them to the rank that needs them, in
turns. A *turn* is one all-to-all; turns are either

* one for every distance between ranks (`p2p`), so that memory does not grow with the ranks; or
* a single one (`all_gather`), so that each span has at most one rectangle.

A turn that no rank needs is left out on all of them.

Legend: s tokens of this rank, t tokens of a turn, B batch, h key/value heads, D head dim, R rows
(spans x batch, span-major).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_gdn import cp_comm, cp_layout
from megatron_gdn.stream import StreamPlan

Ranges = tuple[tuple[int, int], ...]
"""(start, end) stream positions of the keys in a buffer, in buffer order."""


class Turn(NamedTuple):
    """One all-to-all, in which a rank may send to itself."""

    sent: Ranges
    """What this rank sends, by destination."""
    places: tuple[slice, ...]
    """The same as places in this rank's tokens."""
    send_splits: list[int]
    """Tokens to each rank."""
    received: Ranges
    """What this rank gets, by source."""
    recv_splits: list[int]
    """Tokens from each rank."""
    order: list[int]
    """Which of `received` comes first in the stream, which next, and so on."""
    ranges: Ranges
    """`received` in that order, those that touch as one."""
    local: bool
    """Whether no rank sends to another: nothing is to be communicated."""


def key_turns(plan: StreamPlan, cp_comm_type: str) -> tuple[Turn, ...]:
    """The turns of a microbatch, made once and shared by its layers.

    With `p2p` what a rank has itself comes last, while gradients of the turn before are under way; and one
    turn is enough if no rank gets more tokens than it has.

    Args:
        plan: layout, spans and documents of the microbatch.
        cp_comm_type: one of `validation.CP_COMM_TYPES`.
    """
    cache = plan.__dict__.setdefault("_key_turns", {})
    if cp_comm_type not in cache:
        needed = cp_layout.turns_needed(plan.layout, plan.cp_size, plan.cu_seqlens)
        if needed and (cp_comm_type == "all_gather" or _at_most_own(plan)):
            distances = [needed]
        else:
            distances = [(distance,) for distance in sorted(needed, key=lambda d: d or plan.cp_size)]
        turns = (_turn(plan, d) for d in distances)
        cache[cp_comm_type] = tuple(t for t in turns if t.received or not t.local)
    return cache[cp_comm_type]


def _at_most_own(plan: StreamPlan) -> bool:
    """Whether no rank looks back at more tokens than it holds. The same on every rank."""
    for rank in range(plan.cp_size):
        ranges = cp_layout.local_ranges(plan.layout, plan.cp_size, rank, plan.seq_len)
        looked_at = sum(start - cp_layout.document_start(plan.cu_seqlens, start) for start, _ in ranges)
        if looked_at > plan.span_len * len(ranges):
            return False
    return True


def _turn(plan: StreamPlan, distances: Sequence[int]) -> Turn:
    """Each rank gets from the ranks that many places before it."""
    size, rank = plan.cp_size, plan.cp_rank
    targets = {(rank + distance) % size for distance in distances}
    sources = {(rank - distance) % size for distance in distances}
    look = (plan.layout, size, plan.cu_seqlens)
    sent = [cp_layout.earlier_keys(*look, peer, rank) if peer in targets else () for peer in range(size)]
    received = [cp_layout.earlier_keys(*look, rank, peer) if peer in sources else () for peer in range(size)]
    all_sent, all_received = sum(sent, ()), sum(received, ())
    order = sorted(range(len(all_received)), key=all_received.__getitem__)
    return Turn(
        all_sent,
        tuple(_local_slice(plan, stream_range) for stream_range in all_sent),
        [_tokens(ranges) for ranges in sent],
        all_received,
        [_tokens(ranges) for ranges in received],
        order,
        _joined([all_received[i] for i in order]),
        local=tuple(distances) == (0,),
    )


def fetch_keys(
    k: Tensor,
    v: Tensor,
    sums: "KeySums | None",
    plan: StreamPlan,
    turns: Sequence[Turn],
    cp_group: ProcessGroup,
) -> Iterator[tuple[Ranges, Tensor, Tensor | None] | None]:
    """Bring all earlier keys and values that this rank needs here, buffer by buffer.

    Args:
        k: this rank's keys, [R, span_len, h, D].
        v: its values.
        sums: in backward, where gradients of this rank's keys and values are summed; None in forward.
        plan: layout, spans and documents of the microbatch.
        turns: as given by `key_turns`.
        cp_group: ranks sharing the stream.

    Yields:
        None once the first exchange has begun; then for every turn (stream positions of the keys, keys and
        values [t, 2, B, h, D], and in backward zeros of that shape to add their gradients to); and in
        backward None again while the last gradients come home. At None there is time for work that needs
        nothing of other ranks. In the end `sums` holds what all ranks have added.

    Communication: one all-to-all for each turn that is not local, of 2*B*h*D elements for every key that
    is sent; in backward the same once more, and as many to send gradients back in fp32. The next turn's keys
    and the last turn's gradients travel while a turn is worked on.
    """
    k, v = (plan.from_rows(x) for x in (k, v))

    def start(turn: Turn) -> cp_comm.Arrival:
        out = torch.stack([torch.cat([x[:0], *(x[p] for p in turn.places)]) for x in (k, v)], dim=1)
        return _start(turn, out, turn.send_splits, turn.recv_splits, cp_group)

    arrival = start(turns[0]) if turns else None
    yield None
    returning = None
    for number, turn in enumerate(turns):
        kv = arrival.wait()
        arrival = start(turns[number + 1]) if number + 1 < len(turns) else None
        kv = _pieces_in_order(kv, turn.received, turn.order)
        dkv = None if sums is None else torch.zeros_like(kv, dtype=sums.dtype)
        yield turn.ranges, kv, dkv
        if sums is not None:
            in_order = [turn.received[i] for i in turn.order]
            back = _pieces_in_order(dkv, in_order, _inverse(turn.order))
            if returning is not None:
                sums.add(*returning)
            home = _start(turn, back, turn.recv_splits, turn.send_splits, cp_group)
            returning = turn.sent, home
    if returning is not None:
        yield None
        sums.add(*returning)


class KeySums:
    """Gradients of this rank's keys and values from blocks outside their own span.

    Only the ends of spans that some rank looks back at are held, in fp32 (fp64 for fp64).
    """

    def __init__(self, plan: StreamPlan, dtype: torch.dtype):
        """Make empty sums of that dtype for the microbatch of that plan."""
        self.plan, self.dtype = plan, dtype
        self.by_span: dict[int, Tensor] = {}

    def add(self, ranges: Ranges, arrival: cp_comm.Arrival) -> None:
        """Add gradients [t, 2, B, h, D] of keys at these stream positions, one range after another."""
        pieces = arrival.wait().split([end - start for start, end in ranges])
        for (_, end), piece in zip(ranges, pieces, strict=True):
            span = next(i for i, (_, span_end) in enumerate(self.plan.ranges) if span_end == end)
            total = self.by_span.get(span)
            if total is None:
                self.by_span[span] = piece
                continue
            if len(total) < len(piece):  # the piece reaches further back than all before
                total, piece = piece, total
                self.by_span[span] = total
            total[len(total) - len(piece) :] += piece

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        """Add the sums to the gradients [spans, B, span_len, h, D] from the spans' own tokens."""
        for span, total in self.by_span.items():
            for grad, part in zip((dk, dv), total.unbind(1), strict=True):
                grad[span][:, grad.shape[2] - len(total) :] += part.transpose(0, 1)


class _Here:
    """Stands for an `Arrival` of what need not travel."""

    def __init__(self, x: Tensor):
        self.wait = lambda: x


def _start(turn: Turn, x: Tensor, send: list[int], recv: list[int], group: ProcessGroup):
    """Begin the all-to-all of a turn, or give x back if no rank sends to another."""
    return _Here(x) if turn.local else cp_comm.start_all_to_all(x, group, send, recv)


def _tokens(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def _local_slice(plan: StreamPlan, stream_range: tuple[int, int]) -> slice:
    """Where this rank's tokens at stream positions inside one of its spans are in its buffer."""
    start, end = stream_range
    slot = next(i for i, (a, b) in enumerate(plan.ranges) if a <= start and end <= b)
    offset = slot * plan.span_len - plan.ranges[slot][0]
    return slice(start + offset, end + offset)


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges in stream order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


def _pieces_in_order(x: Tensor, ranges: Sequence[tuple[int, int]], order: list[int]) -> Tensor:
    """x, made of one piece for each range, with its pieces in another order."""
    if order == list(range(len(order))):
        return x
    ends = [0, *accumulate(end - start for start, end in ranges)]
    places = [slice(a, b) for a, b in pairwise(ends)]
    return torch.cat([x[places[i]] for i in order])


def _inverse(order: list[int]) -> list[int]:
    """The order that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)
