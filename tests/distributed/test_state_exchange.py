"""The exchange of summaries in both directions, and FlashQLA's composition on several ranks."""

from types import SimpleNamespace

import pytest
import torch

from megatron_gdn import cp_comm
from megatron_gdn.ops import gated_delta_rule, gated_delta_rule_flash_qla
from megatron_gdn.stream import StreamPlan
from tests.distributed.test_gated_delta_net_cp import LAYOUTS, check_case
from tests.helpers import flash_qla_double
from tests.helpers.cases import FP32_TRUTH, GVA_HEADS
from tests.helpers.compare import assert_close
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.gdn import config_for

FORGOTTEN = 1e-4
"""FlashQLA leaves out what has decayed by more than exp(-10) = 4.5e-5."""


def check_reverse(rank, world_size, layout):
    with make_groups(cp=world_size) as groups:
        torch.manual_seed(1234 + rank)
        batch, heads, key_dim, value_dim = 2, 3, 4, 5
        plan = StreamPlan(layout, world_size, rank, 64, batch, (0, 64), torch.device("cpu"))
        rows = plan.local_rows.num_rows
        m = torch.randn(rows, heads, key_dim, key_dim) / key_dim**0.5
        s = torch.randn(rows, heads, key_dim, value_dim).requires_grad_()
        d = torch.randn(rows, heads, key_dim, value_dim)
        exchange = cp_comm.StatesBetweenRanks(plan, groups.cp)
        (want,) = torch.autograd.grad(exchange(torch.cat([m, s], -1)), s, d)
        leaving = exchange.start_reverse(torch.cat([m.mT, d], -1))
        assert_close(f"{layout} leaving", leaving(), want, FP32_TRUTH)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp", (2, 4))
def test_reverse_exchange_is_the_gradient_of_the_exchange(cp, layout):
    """Batch and heads apart, several spans per rank."""
    run_ranks(check_reverse, cp, layout)


def check_layer(rank, world_size, packings, part_chunks):
    composed = SimpleNamespace(run=gated_delta_rule_flash_qla.run)
    with make_groups(cp=world_size) as groups, pytest.MonkeyPatch.context() as monkeypatch:
        flash_qla_double.install(monkeypatch, part_chunks)
        monkeypatch.setitem(gated_delta_rule._BACKENDS, "torch", composed)
        for layout in LAYOUTS:
            config = config_for(GVA_HEADS["gva2"], cp=world_size, cp_layout=layout)
            for packing in packings:
                check_case(groups, config, "chunkwise", packing, "gva2", FORGOTTEN)


@pytest.mark.parametrize("cp", (2, 4))
def test_chunkwise_layer_on_flash_qla(cp):
    """The layer with FlashQLA's double under it, both layouts, documents that cross the ranks' borders."""
    packings = ("one_document", "borders_on_spans", "borders_off_spans", "several_chunks", "batch_of_2")
    run_ranks(check_layer, cp, packings, part_chunks=1)
