"""Every gradient of a whole model, as the optimizer would read it, on several ranks and on one."""

from functools import cache
from typing import NamedTuple

import pytest

from tests.helpers.cases import FP32_SHARDED
from tests.helpers.compare import assert_close
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.model import DENSE_MODEL, check_grads, make_model, make_samples, train_step, whole_tensors

PACKED, DENSE = "borders_off_spans", "batch_of_2"

MODELS = {
    "moe": {},  # 2 key heads, 2 key/value heads
    "moe_4_key_heads": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "dense": DENSE_MODEL | {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "mtp": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0},  # as loud as the main loss
}


class Case(NamedTuple):
    """One run on several ranks."""

    model: str
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    mode: str = "headwise"
    packing: str = PACKED
    per_token: bool = False
    """As --calculate-per-token-loss."""
    overrides: dict = {}
    """Fields of the config that change how, not what, is computed."""


PLAIN_TP = {"sequence_parallel": False}
CONTIGUOUS = {"cp_layout": "contiguous", "cp_comm_type": "all_gather"}

CASES = {
    "tp2": Case("moe", tp=2, etp=2),
    # 2 key/value heads for 4 ranks
    "tp4": Case("moe_4_key_heads", tp=4, etp=4, packing=DENSE),
    "tp4_ep2_etp2": Case("moe_4_key_heads", tp=4, ep=2, etp=2),
    "ep2": Case("moe", dp=2, ep=2),
    "tp2_ep2": Case("moe", tp=2, ep=2, packing=DENSE),
    "tp2_dp2_ep2_etp2": Case("moe", tp=2, dp=2, ep=2, etp=2),
    "cp2_ep2": Case("moe", cp=2, ep=2, mode="chunkwise"),
    "tp2_cp2_ep2_etp2": Case("moe", tp=2, cp=2, ep=2, etp=2, mode="chunkwise"),
    # 1 key head on each tensor-parallel rank for 2 context-parallel ranks
    "tp2_cp2_key_heads_copied": Case("moe", tp=2, cp=2, overrides=CONTIGUOUS),
    # 2 key heads for 4 ranks
    "cp4_key_heads_copied": Case("moe", cp=4, packing=DENSE),
    "dense_tp2": Case("dense", tp=2),
    "dense_tp2_no_sp": Case("dense", tp=2, overrides=PLAIN_TP),
    "dense_tp4": Case("dense", tp=4),
    "dense_tp4_no_sp": Case("dense", tp=4, overrides=PLAIN_TP, packing=DENSE),
    "dense_tp2_cp2_no_sp": Case("dense", tp=2, cp=2, overrides=PLAIN_TP | CONTIGUOUS, mode="chunkwise"),
    "mtp_tp2_cp2": Case("mtp", tp=2, cp=2, mode="chunkwise"),
    "mtp_tp2_cp2_per_token": Case("mtp", tp=2, cp=2, per_token=True, overrides=CONTIGUOUS),
}


@cache
def one_rank(model: str, packing: str, per_token: bool):
    """Whole parameters, loss and whole gradients of the model on one rank."""

    def run(rank, world_size):
        with make_groups() as groups:
            model_ = make_model(groups, "headwise", calculate_per_token_loss=per_token, **MODELS[model])
            state = whole_tensors(model_)
            loss = train_step(model_, groups, make_samples(packing), packing == PACKED)
            grads = whole_tensors(model_, grads=True)
            assert all(grad.any() for grad in grads.values())
            return state, loss, grads

    return run_ranks(run, 1)[0]


def check(rank, world_size, case: Case):
    state, want_loss, want = one_rank(case.model, case.packing, case.per_token)
    sizes = {"expert_model_parallel_size": case.ep, "expert_tensor_parallel_size": case.etp}
    with make_groups(tp=case.tp, cp=case.cp, **sizes) as groups:
        overrides = MODELS[case.model] | case.overrides | {"calculate_per_token_loss": case.per_token}
        model = make_model(groups, case.mode, state, **overrides)
        loss = train_step(model, groups, make_samples(case.packing), case.packing == PACKED)
        assert_close("loss", loss, want_loss, FP32_SHARDED)
        check_grads(case.mode, model, want)


@pytest.mark.parametrize("name", CASES)
def test_grads_of_every_parameter(name):
    """Loss, every gradient on every rank, its norm over all ranks, and the norm that clips."""
    case = CASES[name]
    one_rank(case.model, case.packing, case.per_token)
    run_ranks(check, case.tp * case.cp * case.dp, case)


def check_two_values(rank, world_size):
    state, _, want = one_rank("mtp", PACKED, False)
    with make_groups(cp=world_size) as groups:
        model = make_model(groups, "chunkwise", state, **MODELS["mtp"])
        train_step(model, groups, make_samples(PACKED), packed=True, two_values=True)
        check_grads("two values", model, want)


def test_grads_with_a_loss_function_of_two_values():
    """The host's older form of a loss, (loss, report), is divided otherwise; what is added to it fits."""
    one_rank("mtp", PACKED, False)
    run_ranks(check_two_values, 2)
