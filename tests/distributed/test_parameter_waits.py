"""No parameter is read before the host has waited for it, which it does as it calls the parameter's module.

With `--overlap-param-gather` a parameter may hold the values of the step before until then; here, NaN.
"""

import math

import pytest
import torch

from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.model import DENSE_MODEL, make_model, make_samples, train_step, whole_tensors

CASES = {
    "experts": {},
    "dense": DENSE_MODEL,
    "mtp": {"mtp_num_layers": 1},
    "overlapped shared expert": {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"},
    "recompute some": {
        "recompute_granularity": "selective",
        "recompute_modules": ["gdn_norm_out", "core_attn"],
    },
    "recompute all": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def come_late(model) -> None:
    """Let every parameter be NaN until a module that holds it is called."""
    values = {p: p.detach().clone() for p in model.parameters()}

    def arrive(module, args):
        for p in module.parameters(recurse=False):
            p.data.copy_(values[p])

    for module in model.module.modules():
        module.register_forward_pre_hook(arrive)
    for p in values:
        p.data.fill_(math.nan)


def check(rank, world_size, mode, fields):
    with make_groups(cp=world_size) as groups:
        for tied in (False, True):
            model, samples = make_model(groups, mode, tied=tied, **fields), make_samples("several_chunks")
            want = train_step(model, groups, samples, packed=True)
            grads = whole_tensors(model, grads=True)
            come_late(model)
            got = train_step(model, groups, samples, packed=True)
            assert torch.equal(got, want)
            for name, grad in whole_tensors(model, grads=True).items():
                assert torch.equal(grad, grads[name]), name


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
@pytest.mark.parametrize("mode", ("headwise", "chunkwise"))
@pytest.mark.parametrize("cp", (1, 2))
def test_parameters_are_read_after_they_are_waited_for(cp, mode, fields):
    """Tied and untied output layers; loss and gradients to the last bit."""
    run_ranks(check, cp, mode, fields)
