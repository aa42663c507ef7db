"""What one GatedDeltaNet layer sends, counted, is what the design says."""

import pytest
import torch

from megatron_gdn.comm_volume import chunkwise_bytes, headwise_bytes
from megatron_gdn.gated_delta_net_cp import Sections
from megatron_gdn.stream import StreamParams, StreamPlan
from tests.distributed.test_gated_delta_net_cp import LAYOUTS, build
from tests.helpers.cases import CONV_WIDTH, GVA_HEADS
from tests.helpers.distributed import count_collectives, make_groups, run_ranks
from tests.helpers.gdn import HIDDEN, config_for, random_params


def count_pass(groups, mode, layout, heads, seq_len, batch, dtype):
    """Logs of (forward, backward) of one layer on this rank."""
    sizes = GVA_HEADS[heads]
    cp = groups.cp.size()
    config = config_for(sizes, cp=cp, cp_layout=layout)
    layer = build(config, mode, groups, random_params(sizes), sizes).to(dtype)
    plan = StreamPlan(layout, cp, groups.cp.rank(), seq_len, batch, (0, seq_len), torch.device("cpu"))
    hidden = torch.randn(seq_len // cp, batch, HIDDEN, dtype=dtype, requires_grad=True)
    with count_collectives() as forward:
        output, _ = layer(hidden, packed_seq_params=StreamParams(qkv_format="sbhd", plan=plan))
    with count_collectives() as backward:
        output.backward(torch.randn_like(output))
    return forward, backward


def check_volume(rank, world_size, layout):
    streams = ((64, 1, torch.float32), (128, 1, torch.float32), (64, 2, torch.bfloat16))
    with make_groups(cp=world_size) as groups:
        for heads in ("gva1", "gva4"):
            sections = Sections(*GVA_HEADS[heads])
            for seq_len, batch, dtype in streams:
                stream = (layout, heads, seq_len, batch, dtype)
                want = headwise_bytes(sections, seq_len // world_size * batch, world_size, dtype.itemsize)
                for log in count_pass(groups, "headwise", *stream):
                    assert log.sent_bytes() == want
                    assert [call.name for call in log] == ["all_to_all_single"] * 2
                want = chunkwise_bytes(
                    sections, world_size, rank, layout=layout, batch=batch, element_size=dtype.itemsize
                )
                forward, backward = count_pass(groups, "chunkwise", *stream)
                assert [call.name for call in forward] == ["all_to_all_single", "all_gather_into_tensor"]
                assert [call.name for call in backward] == ["reduce_scatter_tensor", "all_to_all_single"]
                assert forward.sent_bytes() == want
                # A span's tail goes back to where it came from, so a rank's share differs by direction.
                total = torch.tensor([want, backward.sent_bytes()])
                torch.distributed.all_reduce(total)
                assert total[0] == total[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp", (2, 4))
def test_bytes_sent_equal_the_arithmetic(cp, layout):
    """Headwise sends q, k, v, b, a and the output only; chunkwise summaries and halo only, whatever S."""
    run_ranks(check_volume, cp, layout)


def test_arithmetic_of_a_released_size():
    """35B-A3B at cp 2, by hand: 16 key and 32 value heads of 128; 8192 conv channels."""
    sections = Sections(16, 32, 128, 128)
    per_token = 2048 + 2048 + 4096 + 32 + 32 + 4096
    assert headwise_bytes(sections, 1000, 2) == 1000 * per_token * 2 // 2
    four_mib = 32 * 128 * 256 * 4
    assert four_mib == 4 * 2**20
    assert chunkwise_bytes(sections, 2, layout="contiguous") == four_mib + (CONV_WIDTH - 1) * 8192 * 2
    # Rank 1 of zigzag holds the two middle spans: it sends one tail to itself.
    assert chunkwise_bytes(sections, 2, 1) == 2 * four_mib + (CONV_WIDTH - 1) * 8192 * 2
