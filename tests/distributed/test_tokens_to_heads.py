"""`cp2hp` and `hp2cp` against their definition on the whole stream, with every gradient, to the last bit."""

import pytest
import torch

from megatron_gdn import cp_comm
from megatron_gdn.stream import StreamPlan
from tests.distributed.test_gated_delta_net_cp import LAYOUTS
from tests.helpers.compare import local_part
from tests.helpers.distributed import make_groups, run_ranks

SEQ_LEN, BATCH = 24, 2
# Channels in whole words of 8 bytes, and not; blocks for all ranks, and for every other.
CASES = {
    "words": (((16, "all"), (64, "all")), ((32, "all"),)),
    "odd": (((12, "all"), (20, "all")), ((4, "all"),)),
    "copies": (((8, "half"), (16, "all")), ((4, "half"), (8, "all"))),
}


def dealt(x, sections, cp, rank):
    """This rank's blocks of the last axis."""
    parts = zip(x.split([size for size, _ in sections], dim=-1), sections, strict=True)
    return torch.cat([part.chunk(blocks, dim=-1)[rank * blocks // cp] for part, (_, blocks) in parts], dim=-1)


def check(rank, world_size, layout, dtype):
    with make_groups(cp=world_size) as groups:
        plan = StreamPlan(layout, world_size, rank, SEQ_LEN, BATCH, (0, SEQ_LEN), torch.device("cpu"))
        for name, tensors in CASES.items():
            blocks = {"all": world_size, "half": world_size // 2}
            sections = [tuple((size, blocks[to]) for size, to in parts) for parts in tensors]
            # The same on all ranks: the whole stream, and the gradient of every rank's result.
            torch.manual_seed(1234)
            wholes = [torch.randn(SEQ_LEN, BATCH, sum(n for n, _ in parts)).to(dtype) for parts in sections]
            leaves = [x.clone().requires_grad_() for x in wholes]
            want = [
                [dealt(x, s, world_size, r) for x, s in zip(leaves, sections, strict=True)]
                for r in range(world_size)
            ]
            upstream = [[torch.randn_like(x) for x in of_rank] for of_rank in want]

            # In the layer each is a part of a wider tensor.
            mine = [torch.cat([local_part(x, layout, world_size, rank, 0)] * 2, dim=-1) for x in wholes]
            mine = [x[..., x.shape[-1] // 2 :].requires_grad_() for x in mine]
            got = cp_comm.cp2hp(mine, sections, plan, groups.cp)
            for g, w in zip(got, want[rank], strict=True):
                assert torch.equal(g, w), f"{name}: heads of {layout}"

            grads = torch.autograd.grad(got, mine, upstream[rank])
            wanted = torch.autograd.grad(sum(want, []), leaves, sum(upstream, []))
            for g, w in zip(grads, wanted, strict=True):
                w = local_part(w, layout, world_size, rank, 0)
                assert torch.equal(g, w), f"{name}: gradient of {layout}"

            back_and_forth(plan, groups.cp, got[1].detach().requires_grad_(), name)


def back_and_forth(plan, group, mine, name):
    """hp2cp is undone by cp2hp, and its gradient is that of a permutation."""
    tokens = cp_comm.hp2cp(mine, plan, group)
    (again,) = cp_comm.cp2hp([tokens], [((tokens.shape[-1], plan.cp_size),)], plan, group)
    assert torch.equal(again, mine), f"{name}: there and back"
    (grad,) = torch.autograd.grad(again, mine, torch.ones_like(again) * 3)
    assert torch.equal(grad, torch.full_like(mine, 3)), f"{name}: gradient there and back"
    up = torch.randn_like(tokens)
    (grad,) = torch.autograd.grad(cp_comm.hp2cp(mine, plan, group), mine, up)
    (want,) = cp_comm.cp2hp([up], [((up.shape[-1], plan.cp_size),)], plan, group)
    assert torch.equal(grad, want), f"{name}: gradient to tokens"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp", (2, 4))
def test_tokens_to_heads_and_back(cp, layout, dtype):
    """Views of wider tensors, batch of 2, blocks that two ranks share."""
    run_ranks(check, cp, layout, dtype)
