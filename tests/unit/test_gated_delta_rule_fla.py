"""What we compose of fla's kernel, on a torch stand-in for it, against the float64 reference."""

import fla.ops.gated_delta_rule
import pytest
import torch

from megatron_gdn.ops import gated_delta_rule_fla
from megatron_gdn.ops.gated_delta_rule_gates import gates
from megatron_gdn.rows import Rows
from tests.helpers.cases import FP32_TRUTH, GVA_HEADS, PACKINGS
from tests.helpers.compare import assert_close
from tests.helpers.flash_qla_double import packed_rule
from tests.helpers.reference import gated_delta_rule_reference
from tests.helpers.rule import NAMES, ScanInStreamOrder, normalised, rule_inputs, with_grads


@pytest.mark.parametrize("num_spans", (1, 2, 4))
@pytest.mark.parametrize("packing", [name for name, case in PACKINGS.items() if case.batch == 1])
def test_spans_match_reference(monkeypatch, packing, num_spans):
    """Summaries, exchange and entering states; a span that begins with a document starts from zero."""
    monkeypatch.setattr(fla.ops.gated_delta_rule, "chunk_gated_delta_rule", packed_rule)
    case = PACKINGS[packing]
    inputs = rule_inputs(case, GVA_HEADS["gva2"])
    upstream = torch.randn_like(inputs[2])
    want = with_grads(lambda *x: gated_delta_rule_reference(*x, case.positions), inputs, upstream)
    span = case.seq_len // num_spans
    ranges = tuple((i * span, (i + 1) * span) for i in range(num_spans))
    rows = Rows.from_ranges(case.borders, ranges, 1, torch.device("cpu"))

    def ours(*leaves):
        q, k, v, a, b = (x.unflatten(1, (num_spans, span)).flatten(0, 1) for x in normalised(leaves)[:5])
        g, beta = gates(a, b, *leaves[5:])
        exchange = ScanInStreamOrder() if num_spans > 1 else None
        return gated_delta_rule_fla.run(q, k, v, g, beta, rows, exchange).view_as(upstream)

    got = with_grads(ours, [x.float() for x in inputs], upstream)
    for name, g, w in zip(("o", *(f"d {n}" for n in NAMES)), got, want, strict=True):
        assert_close(name, g, w, FP32_TRUTH, dtype=torch.float32)
