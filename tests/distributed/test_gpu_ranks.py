"""Several ranks on one GPU, over gloo: the same layer as on one rank, in every mode and layout.

gloo serves the collectives that this package uses on CUDA tensors too, so that one GPU is enough.
"""

import pytest
import torch

from megatron_gdn.ops.gated_delta_rule import choose_backend
from tests.distributed.test_gated_delta_net_cp import LAYOUTS, MODES, build
from tests.helpers.cases import PACKINGS, Packing
from tests.helpers.compare import assert_close, local_part, summed_grads
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.gdn import HIDDEN, config_for, random_params
from tests.helpers.reference import GDNSizes

pytestmark = pytest.mark.gpu(1)

SIZES = GDNSizes(16, 32, 128, 128)
"""Heads of 35B-A3B, whose kernels and shares the GPU tables compile too: a kernel cache serves both."""
# Spans that FlashQLA cuts into parts.
CASES = PACKINGS | {"one_long_document": Packing(4096), "long_documents": Packing(4096, (0, 900, 3000, 4096))}
BF16_RANKS = 1e-2
"""bf16 kernels that cut a stream in two places: twice flash-linear-attention's bound of 3e-3 against
the truth, for two such results, and the rounding of what crosses between ranks."""


def run_once(groups, backend, mode, layout, case, params, hidden, upstream):
    """Output, input gradient and summed parameter gradients, whole stream, [S, B, hidden]."""
    from megatron_gdn.stream import StreamParams, StreamPlan

    cp, rank = groups.cp.size(), groups.cp.rank()
    config = config_for(SIZES, cp=cp, cp_layout=layout, gdn_backend=backend)
    layer = build(config, mode, groups, params, SIZES).cuda().bfloat16()
    plan = StreamPlan(layout, cp, rank, case.seq_len, case.batch, case.borders, torch.device("cuda", 0))
    mine, up = (local_part(x, layout, cp, rank, 0).contiguous() for x in (hidden, upstream))
    mine.requires_grad_()
    output, _ = layer(mine, packed_seq_params=StreamParams(qkv_format="sbhd", plan=plan))
    output.backward(up)
    return output.detach(), mine.grad, summed_grads(layer.named_parameters(), groups.cp)


def check(rank, world_size, backend, packings):
    torch.cuda.set_device(0)
    with make_groups(cp=world_size) as groups:
        shared, solo = groups.cp, torch.distributed.new_subgroups(1)[0]
        for packing in packings:
            case, params = CASES[packing], random_params(SIZES)
            hidden, upstream = (
                torch.randn(case.seq_len, case.batch, HIDDEN).cuda().bfloat16() for _ in range(2)
            )
            groups.cp = solo
            want = run_once(groups, backend, "headwise", "zigzag", case, params, hidden, upstream)
            groups.cp = shared
            for mode in MODES:
                for layout in LAYOUTS:
                    got = run_once(groups, backend, mode, layout, case, params, hidden, upstream)
                    where = f"{backend} {packing} {mode} {layout}"
                    for name, g, w in zip(("output", "d hidden"), got[:2], want[:2], strict=True):
                        part = local_part(w, layout, world_size, rank, 0)
                        assert_close(f"{where} {name}", g, part, BF16_RANKS)
                    for name, grad in got[2].items():
                        assert_close(f"{where} d {name}", grad, want[2][name], BF16_RANKS)


@pytest.mark.parametrize("cp", (2, 4))
@pytest.mark.parametrize("backend", ("flash_qla", "fla"))
def test_layer_is_the_same_on_ranks_that_share_a_gpu(backend, cp):
    """bf16, both modes and layouts, documents that cross the ranks' borders."""
    try:
        choose_backend(torch.device("cuda"), torch.bfloat16, SIZES[2:], backend)
    except ValueError as why:
        pytest.skip(str(why))
    packings = ("several_chunks", "borders_on_spans", "batch_of_2", "one_long_document", "long_documents")
    run_ranks(check, cp, backend, packings, timeout=400, start="spawn")
