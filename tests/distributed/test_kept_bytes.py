"""A headwise layer does not keep the projections that it has sent to other ranks."""

import weakref

import pytest
import torch

from megatron_gdn.stream import StreamParams, StreamPlan
from tests.distributed.test_gated_delta_net_cp import build
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.gdn import HIDDEN, config_for, random_params
from tests.helpers.reference import GDNSizes

SIZES = GDNSizes(4, 8, 16, 16)
TOKENS = 64


def keeps_projection(rank: int, world_size: int, mode: str) -> bool:
    """Whether all that was projected is still there between forward and backward."""
    with make_groups(cp=world_size) as groups:
        config = config_for(SIZES, cp=world_size)
        layer = build(config, mode, groups, random_params(SIZES), SIZES)
        projected = []
        layer.in_proj.register_forward_hook(lambda _, inputs, out: projected.append(weakref.ref(out[0])))
        plan = StreamPlan(config.cp_layout, world_size, rank, TOKENS, 1, (0, TOKENS), torch.device("cpu"))
        hidden = torch.randn(TOKENS // world_size, 1, HIDDEN, requires_grad=True)
        output, _ = layer(hidden, packed_seq_params=StreamParams(qkv_format="sbhd", plan=plan))
        kept = projected[0]() is not None
        output.sum().backward()
        assert hidden.grad.isfinite().all()
        return kept


@pytest.mark.parametrize(
    ("mode", "ranks", "kept"), [("headwise", 2, False), ("headwise", 1, True), ("chunkwise", 2, True)]
)
def test_headwise_lets_projections_go(mode, ranks, kept):
    """Where queries, keys and values stay on their rank they are kept once, and the gate with them."""
    assert run_ranks(keeps_projection, ranks, mode) == [kept] * ranks
