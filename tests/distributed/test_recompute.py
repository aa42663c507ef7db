"""Recomputing activations changes no bit of loss and gradients, and is really done."""

from collections import Counter

import pytest
import torch
from megatron.core.tensor_parallel.random import HAVE_TE, CheckpointWithoutOutput

from megatron_gdn.attention import CPCoreAttention
from megatron_gdn.gated_delta_net import GatedDeltaNet
from tests.helpers.cases import EXACT
from tests.helpers.compare import assert_close
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.model import make_model, make_samples, shards, train_step, whole_tensors

PACKED, DENSE = "borders_off_spans", "batch_of_2"
STEPS = 2
"""Microbatches; the model has one layer of each kind."""


def full(method: str, layers: int) -> dict:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


# name: (fields of the config, how often a microbatch runs GatedDeltaNet's rule, its norm and the attention)
CASES = {
    "every layer": (full("uniform", 1), (2, 2, 2)),
    "both layers as one": (full("uniform", 2), (2, 2, 2)),
    "first layer": (full("block", 1), (2, 2, 1)),
    "GatedDeltaNet's norm": (selective("gdn_norm_out"), (1, 2, 1)),
    "norm and attention": (selective("gdn_norm_out", "core_attn"), (1, 2, 2)),
}
LAYOUTS = {
    "zigzag": ({}, PACKED),
    "contiguous": ({"cp_layout": "contiguous", "cp_comm_type": "all_gather"}, DENSE),
}


def counted(calls: Counter[str], module: type, name: str) -> None:
    """Count what this rank runs of a layer, from now on."""
    function = getattr(module, name)

    def counting(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)

    setattr(module, name, counting)


def check(rank, world_size, mode: str, layout: str):
    overrides, packing = LAYOUTS[layout]
    calls = Counter()
    counted(calls, GatedDeltaNet, "_recurrence")
    counted(calls, GatedDeltaNet, "_gated_norm")
    counted(calls, CPCoreAttention, "forward")
    with make_groups(cp=world_size) as groups:

        def run(state, fields):
            model = make_model(groups, mode, state, **overrides, **fields)
            state = whole_tensors(model)
            calls.clear()
            loss = train_step(model, groups, make_samples(packing), packing == PACKED)
            counts = tuple(calls[name] / STEPS for name in ("_recurrence", "_gated_norm", "forward"))
            return state, loss, shards(model, grads=True), counts

        state, want_loss, want, counts = run(None, {})
        assert counts == (1, 1, 1)
        assert all(shard.data.any() for shard in want)
        for name, (fields, want_counts) in CASES.items():
            _, loss, grads, counts = run(state, fields)
            assert counts == want_counts, f"{name}: {counts}"
            assert_close(f"{name}: loss", loss, want_loss, EXACT)
            for got, shard in zip(grads, want, strict=True):
                assert_close(f"{name}: d {shard.key}", got.data, shard.data, EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_same_bits(mode, layout):
    """Loss and every gradient on both ranks, packed and of several streams, with experts."""
    run_ranks(check, 2, mode, layout, timeout=300)


def test_host_recomputes_norms_with_transformer_engine_only():
    """The host's fault behind a refusal: it asks about fp8 by default, and False is not None."""
    if HAVE_TE:
        pytest.skip("needs a host without TransformerEngine")
    with pytest.raises(NameError, match="FP8GlobalStateManager"):
        CheckpointWithoutOutput().checkpoint(torch.neg, torch.ones(1, requires_grad=True))
