"""Attention of several ranks on one GPU, over gloo, in bf16, against the float64 reference."""

from functools import cache

import pytest
import torch

from megatron_gdn import attention_cp
from megatron_gdn.attention_cp import context_parallel_attention
from megatron_gdn.ops import attention, attention_cudnn_packed
from megatron_gdn.rows import Rows
from megatron_gdn.stream import StreamPlan
from megatron_gdn.validation import CP_COMM_TYPES
from tests.helpers.cases import BF16_FACTOR, PACKINGS, Packing
from tests.helpers.compare import assert_close, assert_no_worse, local_part
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.reference import attention_reference

pytestmark = pytest.mark.gpu(1)

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 256
SCALE = HEAD_DIM**-0.5
CASES = {name: PACKINGS[name] for name in ("several_chunks", "borders_off_spans", "short_across_border")} | {
    "empty_documents": PACKINGS["empty_documents"],
    "batch_of_2": Packing(1024, None, 2),
    "long": Packing(1024, (0, 3, 700, 701, 1024)),
}


@cache
def inputs_and_truth(name: str):
    """(q, k, v, upstream) and (o, dq, dk, dv), float64 on the CPU, [B, S, heads, D]."""
    case = CASES[name]
    torch.manual_seed(7)
    inputs = tuple(
        torch.randn(case.batch, case.seq_len, n, HEAD_DIM).bfloat16().double()
        for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    o = attention_reference(*leaves, case.positions, SCALE)
    return inputs, (o.detach(), *torch.autograd.grad(o, leaves, inputs[3]))


def on_one_rank(name: str):
    """The same on one rank, [B, S, heads, D]."""
    case = CASES[name]
    rows = Rows.from_ranges(case.borders, ((0, case.seq_len),), case.batch, torch.device("cuda", 0))
    *leaves, do = (x.bfloat16().cuda() for x in inputs_and_truth(name)[0])
    leaves = [x.requires_grad_() for x in leaves]
    o = attention.attention(*leaves, SCALE, rows)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def check(rank, world_size):
    torch.cuda.set_device(0)
    attention_cudnn_packed.MIN_LONGEST = 10  # or no case is long enough
    attention_cp.KEYS_AT_ONCE = 512  # cuts the longest rectangles of `batch_of_2`
    with make_groups(cp=world_size) as groups:
        for name, case in CASES.items():
            inputs, truth = inputs_and_truth(name)
            unsharded = on_one_rank(name)
            for layout in ("zigzag", "contiguous"):

                def mine(x, layout=layout):
                    return local_part(x, layout, world_size, rank, 1).transpose(0, 1).contiguous()

                plan = StreamPlan(
                    layout, world_size, rank, case.seq_len, case.batch, case.borders, torch.device("cuda", 0)
                )
                *leaves, do = (mine(x).bfloat16().cuda() for x in inputs)
                leaves = [x.requires_grad_() for x in leaves]
                for cp_comm_type in CP_COMM_TYPES:
                    o = context_parallel_attention(*leaves, plan, SCALE, groups.cp, cp_comm_type)
                    got = o.detach(), *torch.autograd.grad(o, leaves, do)
                    for part, g, u, w in zip(("o", "dq", "dk", "dv"), got, unsharded, truth, strict=True):
                        where = f"{name} {layout} {cp_comm_type} {part}"
                        assert_close(where, mine(u), mine(w), 6e-3, dtype=torch.bfloat16)
                        assert_no_worse(where, g, mine(u), mine(w), BF16_FACTOR)


@pytest.mark.parametrize("cp", (2, 4))
def test_ranks_that_share_a_gpu_attend_as_one(cp):
    """Both layouts and both exchanges add no rounding to what one rank gives."""
    run_ranks(check, cp, timeout=300, start="spawn")
