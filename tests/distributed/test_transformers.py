"""A checkpoint of transformers computes the same here: logits, loss, every gradient, and routes.

transformers runs each document by itself, in float64; ours runs them packed, in fp32, on several ranks.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_gdn.checkpoint.huggingface.into_model import load_weights
from megatron_gdn.checkpoint.huggingface.to_megatron import Source
from tests.helpers import hf
from tests.helpers.cases import PACKINGS
from tests.helpers.compare import assert_close, local_part
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.hf_truth import Truth, megatron_grads, run_documents
from tests.helpers.model import (
    DENSE_MODEL,
    VOCAB,
    logits_of,
    make_model,
    make_samples,
    shards,
    train_step,
)

LOGITS = 1e-4
"""Largest difference of logits of variance 1; transformers in fp32 is up to 7e-5 from float64, ours 6e-5."""
GRADS = 3e-4
"""Relative RMS of every gradient; transformers in fp32 is up to 8e-5 from float64, ours 1e-4."""
ROUTES = 1e-5
"""Largest difference of a router's weight; transformers in fp32 is 5e-6 from float64."""
PACKED, DENSE = "borders_off_spans", "batch_of_2"


class Case(NamedTuple):
    """A model, its documents, and the ranks they are run on."""

    kind: str
    packing: str
    mode: str = "headwise"
    tp: int = 1
    cp: int = 1
    layout: str = "zigzag"


CASES = {
    "dense_packed": Case("dense", PACKED),
    "dense_packed_headwise_cp2": Case("dense", PACKED, cp=2),
    "dense_packed_chunkwise_cp2": Case("dense", PACKED, "chunkwise", cp=2),
    "dense_batch_chunkwise_cp2": Case("dense", DENSE, "chunkwise", cp=2, layout="contiguous"),
    "dense_packed_tp2": Case("dense", PACKED, tp=2),
    "moe_packed": Case("moe", PACKED),
    "moe_batch_headwise_cp2": Case("moe", DENSE, cp=2),
    "moe_packed_chunkwise_cp2": Case("moe", PACKED, "chunkwise", cp=2, layout="contiguous"),
    "moe_batch_tp2": Case("moe", DENSE, tp=2),
    "moe_packed_chunkwise_tp2_cp2": Case("moe", PACKED, "chunkwise", tp=2, cp=2),
    "next_packed": Case("next", PACKED),
}


class Checkpoint(NamedTuple):
    """A checkpoint in memory of its headers; the files are gone when the session ends."""

    source: Source
    folder: TemporaryDirectory


@cache
def checkpoint(kind: str):
    """(model of transformers, checkpoint) with logits of variance 1."""
    folder = TemporaryDirectory(prefix="transformers-")
    path = Path(folder.name) / "hf"
    model_class, config_class, settings = hf.KINDS[kind]
    known, hf.KINDS[kind] = hf.KINDS[kind], (model_class, config_class, settings | {"vocab_size": VOCAB})
    try:
        model = hf.save_model(kind, path, torch.float32, packed=kind != "dense")
    finally:
        hf.KINDS[kind] = known
    with torch.no_grad():
        tokens = torch.randint(VOCAB, (1, 128), generator=torch.Generator().manual_seed(3))
        model.lm_head.weight /= model(tokens).logits.std()
    hf.write_tensors(path, hf.load_tensors(path) | {"lm_head.weight": model.lm_head.weight.detach()})
    return model, Checkpoint(Source(path), folder)


@cache
def truth(kind: str, packing: str) -> Truth:
    return run_documents(checkpoint(kind)[0], make_samples(packing), PACKINGS[packing].borders)


def build(groups, case: Case):
    """Our model on these ranks, with the checkpoint's weights."""
    source = checkpoint(case.kind)[1].source
    # transformers has one mean over all labels, not the mean over microbatches of each one's
    fields = {"calculate_per_token_loss": True} | (DENSE_MODEL if case.kind == "dense" else {})
    fields |= source.model.fields
    if case.kind != "dense":
        fields |= {"moe_aux_loss_coeff": 0.0}  # transformers adds it only when asked to
    model = make_model(groups, case.mode, **fields | {"cp_layout": case.layout})
    load_weights(model.module, source)
    return model


def of_rank(whole, groups, layout: str, dim: int = 1):
    """This rank's positions of [B, S, ...]; packed or not, rows are cut alike."""
    return local_part(whole, layout, groups.cp.size(), groups.cp.rank(), dim)


def check(rank, world_size, case: Case):
    with make_groups(tp=case.tp, cp=case.cp) as groups:
        model = build(groups, case)
        check_forward(model, groups, case)
        check_step(model, groups, case)


def check_forward(model, groups, case: Case):
    """Logits and routes."""
    want, packed, routes = truth(case.kind, case.packing), case.packing == PACKED, []
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda _, __, output: routes.append(output))
    for sample, logits, layers in zip(make_samples(case.packing), want.logits, want.routes, strict=True):
        routes.clear()
        got = logits_of(model, groups.cp, sample, packed)
        mine = of_rank(logits, groups, case.layout).chunk(case.tp, dim=-1)[groups.tp.rank()]
        assert got.shape == mine.shape
        assert 0.7 < mine.std() < 1.4
        assert (got - mine).abs().max() <= LOGITS, f"logits off by {(got - mine).abs().max():.1e}"
        assert len(routes) == len(layers) == (0 if case.kind == "dense" else 4)
        for number, ((weights, chosen), whole) in enumerate(zip(routes, layers, strict=True)):
            # The host's order is [s, B], shared out over tensor-parallel ranks.
            mine = of_rank(whole, groups, case.layout).transpose(0, 1).chunk(case.tp)[groups.tp.rank()]
            mine = mine.flatten(0, 1)
            assert (mine > 0).sum() == 2 * len(mine)
            assert torch.equal(chosen, mine > 0), f"layer {number}: {(chosen != (mine > 0)).sum()} differ"
            torch.testing.assert_close(weights, mine, rtol=0, atol=ROUTES)


def check_step(model, groups, case: Case):
    """Loss, and gradients as the optimizer would read them."""
    want = truth(case.kind, case.packing)
    grads = megatron_grads(want.grads, checkpoint(case.kind)[1].source.table)
    loss = train_step(model, groups, make_samples(case.packing), case.packing == PACKED)
    assert_close("loss", loss, want.loss, 1e-5)
    seen = set()
    for shard in shards(model, grads=True):
        assert_close(f"d {shard.key}", shard.data, grads[shard.key][shard.place], GRADS)
        seen.add(shard.key)
    assert seen == grads.keys()


@pytest.mark.parametrize("name", CASES)
def test_computes_the_same(name):
    """Every logit, the experts of every token and their weights, the loss, and every gradient."""
    case = CASES[name]
    truth(case.kind, case.packing)  # once, before ranks are forked
    run_ranks(check, case.tp * case.cp, case)
