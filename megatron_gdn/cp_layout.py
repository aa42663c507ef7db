"""Which stream positions a context-parallel rank holds, and where documents cut them.

Integers only: no process group, no device. Loader, attention, GatedDeltaNet and tests all ask
this file, so that nobody derives the partition a second time.

Words: a *stream* is the tokens of one microbatch row in time order; a *span* is a run of
consecutive stream positions held by one rank. Spans are numbered in stream order. A rank's local
buffer holds its spans one after another; the *slot* is a span's place in that buffer.

Source of the zigzag order: megatron-core 0.19.2, core/utils.py,
`_get_batch_on_this_cp_rank_per_sequence_balancing`.
"""

from bisect import bisect_right
from itertools import pairwise
from typing import Literal, get_args

CPLayout = Literal["zigzag", "contiguous"]
CP_LAYOUTS: tuple[str, ...] = get_args(CPLayout)


def spans_per_rank(layout: CPLayout, cp_size: int) -> int:
    """Number of spans a rank holds: 2 for zigzag on several ranks, else 1."""
    if layout not in CP_LAYOUTS:
        raise ValueError(f"--cp-layout {layout!r} is unknown; choose one of {', '.join(CP_LAYOUTS)}.")
    return 2 if layout == "zigzag" and cp_size > 1 else 1


def span_length(layout: CPLayout, cp_size: int, seq_len: int) -> int:
    """Tokens in one span of a stream of `seq_len` tokens.

    Raises:
        ValueError: the stream cannot be cut into equal spans.
    """
    num_spans = cp_size * spans_per_rank(layout, cp_size)
    if seq_len <= 0 or seq_len % num_spans:
        raise ValueError(
            f"a stream of {seq_len} tokens (--seq-length, times --micro-batch-size when documents are "
            f"packed) cannot be cut into {num_spans} equal spans, as --context-parallel-size {cp_size} "
            f"with --cp-layout {layout} needs; use a multiple of {num_spans}."
        )
    return seq_len // num_spans


def rank_spans(layout: CPLayout, cp_size: int, cp_rank: int) -> tuple[int, ...]:
    """Span numbers held by `cp_rank`, in the order of its local buffer.

    zigzag: (r, 2*cp-1-r), which balances causal attention. contiguous: (r,).
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must lie in [0, {cp_size}), got {cp_rank}.")
    if spans_per_rank(layout, cp_size) == 1:
        return (cp_rank,)
    return (cp_rank, 2 * cp_size - 1 - cp_rank)


def span_holder(layout: CPLayout, cp_size: int, span: int) -> tuple[int, int]:
    """(rank, slot) that holds span number `span`."""
    num_spans = cp_size * spans_per_rank(layout, cp_size)
    if not 0 <= span < num_spans:
        raise ValueError(f"span must lie in [0, {num_spans}), got {span}.")
    if span < cp_size:
        return span, 0
    return num_spans - 1 - span, 1


def stacked_to_stream(layout: CPLayout, cp_size: int) -> tuple[int, ...]:
    """For each span in stream order, its index among all ranks' buffers stacked by rank.

    `stacked.view(num_spans, span_len, ...)[list(stacked_to_stream(...))]` is the stream.
    """
    slots = spans_per_rank(layout, cp_size)
    holders = (span_holder(layout, cp_size, span) for span in range(cp_size * slots))
    return tuple(rank * slots + slot for rank, slot in holders)


def local_ranges(layout: CPLayout, cp_size: int, cp_rank: int, seq_len: int) -> tuple[tuple[int, int], ...]:
    """(start, end) stream positions of each span of `cp_rank`, in the order of its local buffer."""
    length = span_length(layout, cp_size, seq_len)
    return tuple((s * length, (s + 1) * length) for s in rank_spans(layout, cp_size, cp_rank))


def check_cu_seqlens(cu_seqlens: tuple[int, ...], seq_len: int) -> None:
    """Refuse document borders that do not cover the stream exactly.

    Empty documents (equal neighbours) are allowed.

    Raises:
        ValueError: wrong first or last border, or borders that go backwards.
    """
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or cu_seqlens[-1] != seq_len:
        raise ValueError(
            f"cu_seqlens must run from 0 to the stream length {seq_len}, got "
            f"{list(cu_seqlens[:4])} ... {list(cu_seqlens[-2:])}; pass the borders of the whole stream "
            "(all CP ranks together), padding counted as a document of its own."
        )
    if any(b < a for a, b in pairwise(cu_seqlens)):
        raise ValueError(f"cu_seqlens must not decrease, got {list(cu_seqlens)[:16]}.")


def document_start(cu_seqlens: tuple[int, ...], position: int) -> int:
    """Start of the document that holds stream position `position`."""
    return cu_seqlens[bisect_right(cu_seqlens, position) - 1]


def borders_in(cu_seqlens: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    """`start`, every document border strictly inside (start, end), and `end`, without repeats."""
    inner = sorted({c for c in cu_seqlens if start < c < end})
    return (start, *inner, end)


def earlier_keys(
    layout: CPLayout, cp_size: int, cu_seqlens: tuple[int, ...], rank: int, owner: int
) -> tuple[tuple[int, int], ...]:
    """(start, end) stream positions held by `owner` that `rank`'s spans look back at.

    A span looks back at what came before it of the document that lies across its start. So of each of
    the owner's spans it is the end that is looked at, or nothing; at most one range for each.
    """
    seq_len = cu_seqlens[-1]
    lookers = [start for start, _ in local_ranges(layout, cp_size, rank, seq_len)]
    out = []
    for start, end in local_ranges(layout, cp_size, owner, seq_len):
        reached = (document_start(cu_seqlens, looker) for looker in lookers if looker >= end)
        first = max(start, min(reached, default=end))
        if first < end:
            out.append((first, end))
    return tuple(out)


def turns_needed(layout: CPLayout, cp_size: int, cu_seqlens: tuple[int, ...]) -> tuple[int, ...]:
    """Every d for which some rank r looks back at keys of rank r - d (modulo cp_size), in order.

    The same on every rank. All of 0 .. cp_size - 1 when a document covers a zigzag stream; none when
    every span starts a document.
    """
    span_len = span_length(layout, cp_size, cu_seqlens[-1])
    rank_of = [
        span_holder(layout, cp_size, span)[0] for span in range(cp_size * spans_per_rank(layout, cp_size))
    ]
    turns = set()
    for span, rank in enumerate(rank_of):
        first = document_start(cu_seqlens, span * span_len) // span_len
        turns |= {(rank - owner) % cp_size for owner in rank_of[first:span]}
    return tuple(sorted(turns))


def halo_routes(
    layout: CPLayout, cp_size: int, cp_rank: int
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Who sends the end of which span to whom, so that every span sees what came before it.

    Returns:
        (sends, receives). sends: (destination rank, local slot) in the order in which an
        all-to-all wants them. receives: (source rank, local slot that the arrival precedes) in the
        order of arrival. Span 0 receives nothing, the last span sends nothing.
    """
    spans = rank_spans(layout, cp_size, cp_rank)
    num_spans = cp_size * len(spans)
    sends, receives = [], []
    for slot, span in enumerate(spans):
        if span + 1 < num_spans:
            rank, their_slot = span_holder(layout, cp_size, span + 1)
            sends.append((rank, their_slot, slot))
        if span > 0:
            rank, _ = span_holder(layout, cp_size, span - 1)
            receives.append((rank, slot))
    # Sender and receiver agree on the order within a pair of ranks: by the receiver's slot.
    return tuple((rank, slot) for rank, _, slot in sorted(sends)), tuple(sorted(receives))
