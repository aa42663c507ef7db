"""The layout tables, written out by hand, and every refusal."""

import pytest
import torch

from megatron_gdn import cp_layout
from tests.helpers.compare import join_parts, local_part

# (layout, cp_size, seq_len) -> tokens of every rank, in the order of its buffer
TOKENS = {
    ("zigzag", 1, 8): [[0, 1, 2, 3, 4, 5, 6, 7]],
    ("contiguous", 1, 8): [[0, 1, 2, 3, 4, 5, 6, 7]],
    ("zigzag", 2, 8): [[0, 1, 6, 7], [2, 3, 4, 5]],
    ("contiguous", 2, 8): [[0, 1, 2, 3], [4, 5, 6, 7]],
    ("zigzag", 4, 8): [[0, 7], [1, 6], [2, 5], [3, 4]],
    ("contiguous", 4, 8): [[0, 1], [2, 3], [4, 5], [6, 7]],
    ("zigzag", 2, 16): [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]],
    ("contiguous", 2, 16): [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
    ("zigzag", 4, 16): [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
    ("contiguous", 4, 16): [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
}
SPANS = {
    ("zigzag", 1): [(0,)],
    ("contiguous", 1): [(0,)],
    ("zigzag", 2): [(0, 3), (1, 2)],
    ("contiguous", 2): [(0,), (1,)],
    ("zigzag", 4): [(0, 7), (1, 6), (2, 5), (3, 4)],
    ("contiguous", 4): [(0,), (1,), (2,), (3,)],
}
STACKED_TO_STREAM = {
    ("zigzag", 1): (0,),
    ("contiguous", 1): (0,),
    ("zigzag", 2): (0, 2, 3, 1),
    ("contiguous", 2): (0, 1),
    ("zigzag", 4): (0, 2, 4, 6, 7, 5, 3, 1),
    ("contiguous", 4): (0, 1, 2, 3),
}


@pytest.mark.parametrize(("layout", "cp_size", "seq_len"), TOKENS)
def test_local_ranges_hold_the_tokens_written_by_hand(layout, cp_size, seq_len):
    """Every rank holds exactly the tokens of the table, in that order."""
    for rank, tokens in enumerate(TOKENS[layout, cp_size, seq_len]):
        ranges = cp_layout.local_ranges(layout, cp_size, rank, seq_len)
        assert [t for start, end in ranges for t in range(start, end)] == tokens
        assert {end - start for start, end in ranges} == {cp_layout.span_length(layout, cp_size, seq_len)}


@pytest.mark.parametrize(("layout", "cp_size"), SPANS)
def test_spans_and_holders_agree_with_the_table(layout, cp_size):
    """rank_spans is the table, spans_per_rank its width, and span_holder finds every span's place."""
    for rank, spans in enumerate(SPANS[layout, cp_size]):
        assert cp_layout.rank_spans(layout, cp_size, rank) == spans
        assert cp_layout.spans_per_rank(layout, cp_size) == len(spans)
        for slot, span in enumerate(spans):
            assert cp_layout.span_holder(layout, cp_size, span) == (rank, slot)


@pytest.mark.parametrize(("layout", "cp_size"), STACKED_TO_STREAM)
def test_order_agrees_with_the_table(layout, cp_size):
    """stacked_to_stream is the table."""
    assert cp_layout.stacked_to_stream(layout, cp_size) == STACKED_TO_STREAM[layout, cp_size]


@pytest.mark.parametrize("layout", cp_layout.CP_LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_all_ranks_together_are_the_stream(layout, cp_size):
    """Stacked by rank and put in order, the local buffers are the stream, token by token."""
    stream = torch.arange(48)
    parts = [local_part(stream, layout, cp_size, rank, 0) for rank in range(cp_size)]
    stacked = torch.cat(parts).view(cp_size * cp_layout.spans_per_rank(layout, cp_size), -1)
    assert torch.equal(stacked[list(cp_layout.stacked_to_stream(layout, cp_size))].reshape(-1), stream)
    assert torch.equal(join_parts(parts, layout, 0), stream)


def test_zigzag_is_the_host_order():
    """Zigzag parts equal what the host's loader hands to each context-parallel rank."""
    from megatron.core.utils import _get_batch_on_this_cp_rank_per_sequence_balancing as host_part

    from tests.helpers.distributed import run_ranks

    tokens = torch.arange(64).reshape(2, 32)

    def rank_part(rank: int, world_size: int):
        import torch.distributed as dist

        return host_part({"tokens": tokens}, dist.group.WORLD)["tokens"]

    for rank, got in enumerate(run_ranks(rank_part, 4)):
        assert torch.equal(local_part(tokens, "zigzag", 4, rank, 1), got)


def test_document_start_and_borders_with_empty_documents():
    """Empty documents add no border and are never the document of a token."""
    borders = (0, 0, 3, 3, 3, 8, 8)
    assert [cp_layout.document_start(borders, t) for t in range(8)] == [0, 0, 0, 3, 3, 3, 3, 3]
    assert cp_layout.borders_in(borders, 0, 8) == (0, 3, 8)
    assert cp_layout.borders_in(borders, 3, 8) == (3, 8)
    assert cp_layout.borders_in(borders, 1, 4) == (1, 3, 4)
    assert cp_layout.borders_in((0, 2, 4, 5, 9), 2, 5) == (2, 4, 5)


@pytest.mark.parametrize("borders", [(0, 8), (0, 0, 8), (0, 3, 3, 8), (0, 8, 8)])
def test_check_cu_seqlens_accepts_borders_that_cover_the_stream(borders):
    """Any lengths, empty documents included."""
    cp_layout.check_cu_seqlens(borders, 8)


@pytest.mark.parametrize(
    ("borders", "message"),
    [
        ((0,), "must run from 0 to the stream length 8"),
        ((), "must run from 0 to the stream length 8"),
        ((1, 8), "must run from 0 to the stream length 8"),
        ((0, 4), r"cu_seqlens must run from 0 .* got \[0, 4\] .* whole stream"),
        ((0, 9), "must run from 0 to the stream length 8"),
        ((0, 5, 3, 8), r"cu_seqlens must not decrease, got \[0, 5, 3, 8\]"),
    ],
)
def test_check_cu_seqlens_refuses_other_borders(borders, message):
    """Borders that miss the ends or go backwards are named."""
    with pytest.raises(ValueError, match=message):
        cp_layout.check_cu_seqlens(borders, 8)


@pytest.mark.parametrize(
    ("layout", "cp_size", "seq_len", "multiple"),
    [("zigzag", 4, 12, 8), ("zigzag", 2, 6, 4), ("contiguous", 4, 6, 4), ("contiguous", 2, 0, 2)],
)
def test_span_length_refuses_streams_that_do_not_divide(layout, cp_size, seq_len, multiple):
    """The message names the flags, the length that came, and the multiple that is needed."""
    with pytest.raises(ValueError) as refused:
        cp_layout.span_length(layout, cp_size, seq_len)
    for part in (
        f"a stream of {seq_len} tokens",
        "--seq-length",
        f"--context-parallel-size {cp_size}",
        f"--cp-layout {layout}",
        f"use a multiple of {multiple}.",
    ):
        assert part in str(refused.value)


def test_unknown_layout_is_refused_with_the_flag_and_the_choices():
    """A misspelt layout names --cp-layout and what it may be."""
    with pytest.raises(ValueError, match="--cp-layout 'zigzig' is unknown; choose one of zigzag, contiguous"):
        cp_layout.spans_per_rank("zigzig", 2)
    with pytest.raises(ValueError, match="--cp-layout"):
        cp_layout.local_ranges("zigzig", 1, 0, 8)


@pytest.mark.parametrize("cp_rank", [-1, 2])
def test_rank_out_of_range_is_refused(cp_rank):
    """A rank outside the group is no rank."""
    with pytest.raises(ValueError, match=rf"cp_rank must lie in \[0, 2\), got {cp_rank}"):
        cp_layout.rank_spans("zigzag", 2, cp_rank)


@pytest.mark.parametrize(
    ("layout", "span", "count"), [("zigzag", 4, 4), ("zigzag", -1, 4), ("contiguous", 2, 2)]
)
def test_span_out_of_range_is_refused(layout, span, count):
    """A span outside the stream is no span."""
    with pytest.raises(ValueError, match=rf"span must lie in \[0, {count}\), got {span}"):
        cp_layout.span_holder(layout, 2, span)


LOOKING_BACK = {
    # (layout, cp_size, borders): ranges that every rank gets from every owner, turns in which it does
    ("zigzag", 2, (0, 16)): (
        {(0, 0): ((0, 4),), (0, 1): ((4, 8), (8, 12)), (1, 0): ((0, 4),), (1, 1): ((4, 8),)},
        (0, 1),
    ),
    ("contiguous", 2, (0, 16)): ({(1, 0): ((0, 8),)}, (1,)),
    # a document that lies across the stream's middle only, and an empty one
    ("zigzag", 2, (0, 4, 6, 10, 10, 12, 16)): ({(1, 1): ((6, 8),)}, (0,)),
    ("zigzag", 2, (0, 3, 5, 16)): ({(0, 1): ((5, 8), (8, 12)), (1, 0): ((3, 4),), (1, 1): ((5, 8),)}, (0, 1)),
    ("zigzag", 2, (0, 4, 8, 12, 16)): ({}, ()),
    ("contiguous", 4, (0, 7, 16)): (
        {(1, 0): ((0, 4),), (2, 1): ((7, 8),), (3, 1): ((7, 8),), (3, 2): ((8, 12),)},
        (1, 2),
    ),
}


@pytest.mark.parametrize(("layout", "cp_size", "borders"), LOOKING_BACK)
def test_earlier_keys_agree_with_the_table(layout, cp_size, borders):
    """What each rank looks back at, written out by hand, and the turns in which it gets it."""
    ranges, turns = LOOKING_BACK[layout, cp_size, borders]
    for rank in range(cp_size):
        for owner in range(cp_size):
            got = cp_layout.earlier_keys(layout, cp_size, borders, rank, owner)
            assert got == ranges.get((rank, owner), ()), (rank, owner)
    assert cp_layout.turns_needed(layout, cp_size, borders) == turns
