"""Auxiliary losses of routers weigh the same on any number of ranks, however the loss is divided."""

from functools import cache
from itertools import product

import pytest
import torch

from tests.helpers.cases import FP32_SHARDED
from tests.helpers.compare import assert_close, relative_rms
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.model import check_grads, make_model, make_samples, train_step, whole_tensors

PACKED, DENSE = "borders_off_spans", "batch_of_2"
NO_LOSS = {"moe_aux_loss_coeff": 0.0}
LOSSES = {
    kind: {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 1.0}
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
} | {"z_loss": NO_LOSS | {"moe_z_loss_coeff": 0.1}}


def step(groups, packing, per_token, state, all_count=False, **overrides):
    """The model after a step, and its loss."""
    options = overrides | {"calculate_per_token_loss": per_token}
    model = make_model(groups, "chunkwise", state, **options)
    samples = make_samples(packing)
    if all_count:
        for sample in samples:
            sample["loss_mask"] = torch.ones_like(sample["loss_mask"])
    return model, train_step(model, groups, samples, packing == PACKED)


@cache
def one_rank(packing: str):
    """Parameters, and (loss, whole gradients) by kind of loss and by --calculate-per-token-loss."""

    def run(rank, world_size):
        with make_groups() as groups:
            state, found = whole_tensors(make_model(groups, "chunkwise")), {}
            for kind, per_token in product(LOSSES, (False, True)):
                model, loss = step(groups, packing, per_token, state, **LOSSES[kind])
                found[kind, per_token] = loss, whole_tensors(model, grads=True)
            return state, found

    return run_ranks(run, 1)[0]


def check(rank, world_size, packing, tp):
    state, found = one_rank(packing)
    with make_groups(tp=tp, cp=world_size // tp) as groups:
        for (kind, per_token), (want_loss, want) in found.items():
            where = f"{kind} per token {per_token}"
            model, loss = step(groups, packing, per_token, state, **LOSSES[kind])
            assert_close(f"{where} loss", loss, want_loss, FP32_SHARDED)
            check_grads(where, model, want)


@pytest.mark.parametrize(("ranks", "tp", "packing"), [(2, 1, PACKED), (4, 1, DENSE), (2, 2, DENSE)])
def test_auxiliary_losses_on_several_ranks(ranks, tp, packing):
    """Every gradient on 2 and 4 context-parallel ranks, and with sequence parallelism, is one rank's."""
    one_rank(packing)
    run_ranks(check, ranks, packing, tp)


def check_share(rank, world_size):
    """For each loss: relative difference of a router's gradient (to that without, between both divisions)."""
    with make_groups() as groups:
        router = "decoder.layers.0.mlp.router.weight"

        def grad(per_token, **overrides):
            model, _ = step(groups, DENSE, per_token, state, all_count=True, **overrides)
            return whole_tensors(model, grads=True)[router]

        state = whole_tensors(make_model(groups, "chunkwise"))
        without = grad(False, **NO_LOSS)
        found = {}
        for kind, overrides in LOSSES.items():
            plain, per_token = grad(False, **overrides), grad(True, **overrides)
            found[kind] = relative_rms(plain, without), relative_rms(per_token, plain)
        return found


def test_auxiliary_loss_weighs_the_same_however_the_loss_is_divided():
    """Where every label counts, both divisions are one; and the losses are loud enough to be tested."""
    for kind, (share, difference) in run_ranks(check_share, 1)[0].items():
        assert share > 0.5 and difference < FP32_SHARDED, (kind, share, difference)
