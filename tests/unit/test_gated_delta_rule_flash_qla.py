"""What we compose of FlashQLA's building blocks, on a double of them, against the float64 reference."""

import sys

import pytest
import torch

from megatron_gdn.ops import gated_delta_rule_flash_qla
from megatron_gdn.ops.gated_delta_rule_gates import gates
from megatron_gdn.rows import Rows
from tests.helpers import flash_qla_double
from tests.helpers.cases import GVA_HEADS, PACKINGS, Packing
from tests.helpers.compare import assert_close
from tests.helpers.reference import gated_delta_rule_reference
from tests.helpers.rule import NAMES, ScanInStreamOrder, normalised, rule_inputs, with_grads

FORGOTTEN = 1e-4
"""FlashQLA leaves out what has decayed by more than exp(-10) = 4.5e-5."""

# Spans of several chunks: documents that end in the middle of a part, of a chunk, at a span border, and one
# that runs through two spans.
LONG = Packing(768, (0, 100, 164, 192, 600, 620, 768))


def compare(case: Packing, num_spans: int, shift: float = 0.0):
    """Rows that pass their state on, in one process, against the whole stream token by token."""
    inputs = rule_inputs(case, GVA_HEADS["gva2"])
    inputs[5] -= shift
    upstream = torch.randn_like(inputs[2])
    want = with_grads(lambda *x: gated_delta_rule_reference(*x, case.positions), inputs, upstream)
    span = case.seq_len // num_spans
    ranges = tuple((i * span, (i + 1) * span) for i in range(num_spans))
    rows = Rows.from_ranges(case.borders, ranges, case.batch, torch.device("cpu"))

    def ours(*leaves):
        q, k, v, a, b = (x.unflatten(1, (num_spans, span)).flatten(0, 1) for x in normalised(leaves)[:5])
        g, beta = gates(a, b, *leaves[5:])
        exchange = ScanInStreamOrder() if num_spans > 1 else None
        return gated_delta_rule_flash_qla.run(q, k, v, g, beta, rows, exchange).view_as(upstream)

    got = with_grads(ours, [x.float() for x in inputs], upstream)
    for name, g, w in zip(("o", *(f"d {n}" for n in NAMES)), got, want, strict=True):
        assert_close(name, g, w, FORGOTTEN, dtype=torch.float32)


@pytest.mark.parametrize("num_spans", (1, 2, 4))
@pytest.mark.parametrize("packing", [name for name, case in PACKINGS.items() if case.batch == 1])
def test_spans_match_reference(monkeypatch, packing, num_spans):
    """Every packing, parts of one chunk."""
    flash_qla_double.install(monkeypatch, part_chunks=1)
    compare(PACKINGS[packing], num_spans)


# Spans of 2.75 chunks in one document.
RAGGED = Packing(704, (0, 50, 704))


@pytest.mark.parametrize("case", (LONG, RAGGED), ids=("long", "ragged"))
@pytest.mark.parametrize("part_chunks", (1, 2, 100))
def test_long_spans_match_reference(monkeypatch, case, part_chunks):
    """Spans of many parts, of ragged parts, and of one part each; decay from weak to strong."""
    flash_qla_double.install(monkeypatch, part_chunks=part_chunks)
    compare(case, 4)


@pytest.mark.parametrize("part_chunks", (1, 100))
def test_state_that_lasts_passes_through_many_spans(monkeypatch, part_chunks):
    """Heads that hardly forget, one document: every span's M counts."""
    flash_qla_double.install(monkeypatch, part_chunks=part_chunks)
    compare(Packing(768), 6, shift=4.0)


def test_states_are_made_anew_while_gradients_travel(monkeypatch):
    """In backward the exchange begins before the parts' states are recomputed, and is waited for after."""
    flash_qla_double.install(monkeypatch, part_chunks=1)
    order, start = [], ScanInStreamOrder.start_reverse
    chunk = sys.modules["flash_qla.ops.gated_delta_rule.chunk"]
    fused_gdr_h = chunk.fused_gdr_h

    def started(self, summaries):
        wait = start(self, summaries)
        order.append("start")
        return lambda: (order.append("wait"), wait())[1]

    def made(*args, **kwargs):
        order.append("states")
        return fused_gdr_h(*args, **kwargs)

    monkeypatch.setattr(ScanInStreamOrder, "start_reverse", started)
    monkeypatch.setattr(chunk, "fused_gdr_h", made)
    compare(LONG, 4)
    assert order == ["start", "states", "wait"]


def test_batch(monkeypatch):
    """Rows of a batch keep to themselves."""
    flash_qla_double.install(monkeypatch, part_chunks=1)
    compare(PACKINGS["batch_of_2"], 1)


def test_layers_share_what_is_made_of_the_lengths(monkeypatch):
    """The partition is built once per microbatch and number of heads."""
    flash_qla_double.install(monkeypatch, part_chunks=1)
    module = sys.modules["flash_qla.ops.gated_delta_rule.chunk.cp"]
    build, calls = module.build_cp_context, []
    monkeypatch.setattr(module, "build_cp_context", lambda *a, **kw: calls.append(kw) or build(*a, **kw))
    rows = Rows.from_ranges((0, 128), ((0, 128),), 1, torch.device("cpu"))
    for num_heads in (4, 8, 4, 8):
        q, v = torch.randn(1, 128, 2, 16), torch.randn(1, 128, num_heads, 32)
        g, beta = -torch.rand(1, 128, num_heads), torch.rand(1, 128, num_heads)
        gated_delta_rule_flash_qla.run(q, q, v, g, beta, rows, None)
    assert [call["num_v_heads"] for call in calls] == [4, 8]
