"""Rows and plans against brute force on random documents, and what a plan refuses."""

import random

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gdn import cp_layout, stream
from megatron_gdn.rows import Rows
from megatron_gdn.stream import StreamParams, StreamPlan, dense_plan, plan_of
from tests.helpers.cases import PACKINGS
from tests.helpers.compare import local_part

CPU = torch.device("cpu")


def _random_borders(rng: random.Random, seq_len: int) -> tuple[int, ...]:
    """Borders of up to 9 documents, any of which may be empty."""
    return (0, *sorted(rng.randint(0, seq_len) for _ in range(rng.randint(0, 8))), seq_len)


def _documents(borders: tuple[int, ...]) -> list[tuple[int, int]]:
    """(document number, position in it) of every token of the stream."""
    lengths = [b - a for a, b in zip(borders, borders[1:], strict=False)]
    return [(number, place) for number, length in enumerate(lengths) for place in range(length)]


class Group:
    """As much of a process group as a plan asks for."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """Rank in the group."""
        return self._rank

    def size(self) -> int:
        """Ranks in the group."""
        return self._size


class CountedBorders:
    """Borders that count how often they are copied to the host."""

    def __init__(self, borders: tuple[int, ...]):
        self.borders, self.copies = borders, 0

    def tolist(self) -> list[int]:
        """The copy."""
        self.copies += 1
        return list(self.borders)


@pytest.mark.parametrize("seed", range(60))
def test_rows_agree_with_a_walk_over_the_documents(seed):
    """positions, borders, first_positions and cu_seqlens of random documents and ranges."""
    rng = random.Random(seed)
    seq_len, batch = rng.randint(2, 40), rng.randint(1, 3)
    borders = _random_borders(rng, seq_len)
    documents = _documents(borders)
    length = rng.randint(1, seq_len)
    starts = [rng.randint(0, seq_len - length) for _ in range(rng.randint(1, 3))]
    rows = Rows.from_ranges(borders, tuple((s, s + length) for s in starts), batch, CPU)

    tokens = [documents[s : s + length] for s in starts for _ in range(batch)]
    begins = [[i for i in range(length) if i == 0 or row[i][0] != row[i - 1][0]] for row in tokens]
    pieces = [b - a for row in begins for a, b in zip(row, [*row[1:], length], strict=True)]
    assert (rows.num_rows, rows.row_len) == (len(starts) * batch, length)
    assert rows.positions.tolist() == [[place for _, place in row] for row in tokens]
    assert rows.borders == tuple((*row, length) for row in begins)
    assert rows.first_positions == tuple(row[0][1] for row in tokens)
    assert rows.cu_seqlens.tolist() == [0, *torch.tensor(pieces).cumsum(0).tolist()]
    assert (rows.positions.dtype, rows.cu_seqlens.dtype) == (torch.int64, torch.int32)
    assert rows.whole == all(places == list(range(length)) for places in rows.positions.tolist())


@pytest.mark.parametrize("layout", cp_layout.CP_LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("name", PACKINGS)
def test_plan_positions_are_the_stream_cut_by_rank(name, cp_size, layout):
    """Every rank's rows and positions are its part of the whole stream's, for every case."""
    case = PACKINGS[name]
    for rank in range(cp_size):
        plan = StreamPlan(layout, cp_size, rank, case.seq_len, case.batch, case.borders, CPU)
        local = local_part(case.positions, layout, cp_size, rank, 1)
        assert torch.equal(plan.stream_rows.positions, case.positions)
        assert torch.equal(plan.local_positions, local[0])
        spans = local.view(case.batch, len(plan.ranges), plan.span_len).transpose(0, 1)
        assert torch.equal(plan.local_rows.positions, spans.reshape(-1, plan.span_len))
        assert plan.packed == (len(case.borders) > 2)


@pytest.mark.parametrize("seed", range(20))
def test_plan_positions_of_random_documents(seed):
    """The same for random documents, empty ones included."""
    rng = random.Random(seed)
    layout, cp_size = rng.choice(cp_layout.CP_LAYOUTS), rng.choice([1, 2, 3, 4])
    seq_len = 2 * cp_size * rng.randint(1, 9)
    borders = _random_borders(rng, seq_len)
    whole = torch.tensor([place for _, place in _documents(borders)])
    for rank in range(cp_size):
        plan = StreamPlan(layout, cp_size, rank, seq_len, 1, borders, CPU)
        assert torch.equal(plan.local_positions, local_part(whole, layout, cp_size, rank, 0))


def test_rows_whole_is_false_when_a_row_begins_inside_a_document():
    """One piece that continues an earlier one is not a whole document."""
    assert Rows.from_ranges((0, 8), ((0, 8),), 2, CPU).whole
    assert not Rows.from_ranges((0, 8), ((4, 8),), 1, CPU).whole
    assert not Rows.from_ranges((0, 3, 8), ((0, 8),), 1, CPU).whole
    assert Rows.from_ranges((0, 4, 8), ((4, 8),), 1, CPU).whole


def test_plan_order_is_that_of_the_layout():
    """The device tensor holds what cp_layout says."""
    plan = StreamPlan("zigzag", 2, 0, 8, 1, (0, 8), CPU)
    assert plan.stacked_to_stream.tolist() == [0, 2, 3, 1]


def test_plan_refuses_wrong_borders_and_lengths():
    """A plan that could not be right is never made."""
    with pytest.raises(ValueError, match="must run from 0 to the stream length 8"):
        StreamPlan("zigzag", 2, 0, 8, 1, (0, 4), CPU)
    with pytest.raises(ValueError, match="--context-parallel-size 2 with --cp-layout zigzag"):
        StreamPlan("zigzag", 2, 0, 6, 1, (0, 6), CPU)
    with pytest.raises(ValueError, match="--cp-layout"):
        StreamPlan("diagonal", 2, 0, 8, 1, (0, 8), CPU)


def _ask(params, layout="zigzag", rank=1, size=2, seq_len_local=8, batch=1) -> StreamPlan:
    return plan_of(
        params,
        layout=layout,
        cp_group=Group(rank, size),
        seq_len_local=seq_len_local,
        batch=batch,
        device=CPU,
    )


@pytest.mark.parametrize("params", [None, PackedSeqParams(qkv_format="sbhd")])
def test_plan_of_dense_microbatch_is_made_once(params):
    """Without packed documents every layer of every step gets the same plan object."""
    plan = _ask(params, batch=3)
    assert plan is _ask(params, batch=3)
    assert plan is dense_plan("zigzag", 2, 1, 16, 3, CPU)
    assert (plan.cu_seqlens, plan.packed, plan.seq_len, plan.cp_rank) == ((0, 16), False, 16, 1)
    assert plan is not _ask(params, batch=2)


@pytest.mark.parametrize("field", ["cu_seqlens_q", "cu_seqlens_q_padded"])
def test_plan_of_host_params_copies_the_borders_once(field):
    """However many layers ask, cu_seqlens comes to the host once; padded borders win."""
    borders = CountedBorders((0, 5, 5, 16))
    params = PackedSeqParams(qkv_format="thd", **{"cu_seqlens_q": None, field: borders})
    plans = [_ask(params) for _ in range(5)]
    assert borders.copies == 1
    assert all(plan is plans[0] for plan in plans)
    assert plans[0].cu_seqlens == (0, 5, 5, 16)
    assert plans[0].packed


def test_plan_of_host_params_follows_new_borders():
    """Parameters that are used again with other borders are read again."""
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=CountedBorders((0, 5, 16)))
    assert _ask(params).cu_seqlens == (0, 5, 16)
    params.cu_seqlens_q = CountedBorders((0, 7, 16))
    assert _ask(params).cu_seqlens == (0, 7, 16)


def test_plan_of_host_params_prefers_padded_borders():
    """Padding is a document of its own, so the padded borders are those of the stream."""
    actual, padded = CountedBorders((0, 4, 12)), CountedBorders((0, 8, 16))
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=actual, cu_seqlens_q_padded=padded)
    assert _ask(params).cu_seqlens == (0, 8, 16)
    assert (actual.copies, padded.copies) == (0, 1)


def test_plan_of_stream_params_is_the_plan_that_came(monkeypatch):
    """A plan made by the loader is used as it is: no tensor is read, no plan is made."""
    plan = StreamPlan("zigzag", 2, 1, 16, 1, (0, 7, 16), CPU)
    borders = CountedBorders(plan.cu_seqlens)
    params = StreamParams(qkv_format="thd", cu_seqlens_q=borders, plan=plan)
    monkeypatch.setattr(stream, "StreamPlan", None)
    assert _ask(params) is plan
    assert borders.copies == 0


@pytest.mark.parametrize(
    "asked",
    [{"layout": "contiguous"}, {"rank": 0}, {"size": 4}, {"seq_len_local": 4}, {"batch": 2}],
)
def test_plan_of_refuses_a_plan_cut_for_something_else(asked):
    """A layer with another layout, rank, size, length or batch refuses, and names --cp-layout."""
    plan = StreamPlan("zigzag", 2, 1, 16, 1, (0, 7, 16), CPU)
    with pytest.raises(
        ValueError, match="--cp-layout must be the same for the data and for every layer"
    ) as e:
        _ask(StreamParams(qkv_format="thd", plan=plan), **asked)
    assert "('zigzag', 2, 1, 16, 1)" in str(e.value)


def test_plan_of_refuses_host_borders_of_another_length():
    """cu_seqlens of this rank only, instead of the whole stream, are refused."""
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 8]))
    with pytest.raises(ValueError, match="pass the borders of the whole stream"):
        _ask(params)
