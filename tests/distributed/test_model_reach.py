"""What one token's change or loss reaches in a whole model, and what it must not."""

from functools import cache
from itertools import pairwise, product

import pytest
import torch

from tests.helpers.cases import EXACT, FP32_SHARDED, PACKINGS
from tests.helpers.compare import assert_close, local_part
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.model import (
    DENSE_MODEL,
    VOCAB,
    check_grads,
    logits_of,
    make_model,
    make_samples,
    train_step,
    whole_tensors,
)

MODES = ("headwise", "chunkwise")
LAYOUTS = {"zigzag": "p2p", "contiguous": "all_gather"}
"""And how attention exchanges keys and values, so that both ways come up."""
STREAMS = ("one_document", "batch_of_2")
DOCUMENTS = ("borders_off_spans", "borders_on_spans")
MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}


def build(groups, mode, layout, state=None, **overrides):
    """A model without experts, unless told otherwise."""
    options = DENSE_MODEL | overrides
    return make_model(groups, mode, state, cp_layout=layout, cp_comm_type=LAYOUTS[layout], **options)


def last_rank_samples(packing: str, layout: str, cp: int):
    """Microbatches whose labels count on the last of `cp` ranks only."""
    samples = make_samples(packing)
    case = PACKINGS[packing]
    places = torch.arange(case.seq_len).expand(case.batch, -1)
    last = local_part(places, layout, cp, cp - 1, 1)[0]
    for sample in samples:
        sample["loss_mask"] = torch.zeros(case.batch, case.seq_len)
        sample["loss_mask"][:, last] = 1
    return samples


def step(model, groups, samples, packed):
    """Gradients of the embedded tokens of every microbatch [s, B, hidden], and this rank's part of the
    parameters' gradients, by name, before the ranks' parts are summed."""
    embedded, own = [], {}

    def keep(module, inputs, output):
        output.retain_grad()
        embedded.append(output)

    def remember(**options):
        own.update({name: p.main_grad.clone() for name, p in model.module.named_parameters()})
        finish(**options)

    hook = model.module.embedding.register_forward_hook(keep)
    finish, model.finish_grad_sync = model.finish_grad_sync, remember
    train_step(model, groups, samples, packed)
    hook.remove()
    return [x.grad for x in embedded], own


@cache
def one_rank(cp: int):
    """Parameters, and by (stream, layout) the gradients of tokens and of parameters, on one rank."""

    def run(rank, world_size):
        state, found = None, {}
        with make_groups() as groups:
            for packing in STREAMS:
                for layout in LAYOUTS:
                    model = build(groups, "headwise", layout, state)
                    state = whole_tensors(model) if state is None else state
                    samples = last_rank_samples(packing, layout, cp)
                    hidden, _ = step(model, groups, samples, packing == "one_document")
                    found[packing, layout] = hidden, whole_tensors(model, grads=True)
        return state, found

    return run_ranks(run, 1)[0]


def check_last_rank_loss(rank, world_size, mode):
    state, found = one_rank(world_size)
    with make_groups(cp=world_size) as groups:
        for (packing, layout), (want_hidden, want) in found.items():
            where = f"{mode} {layout} {packing}"
            model = build(groups, mode, layout, state)
            samples = last_rank_samples(packing, layout, world_size)
            hidden, own = step(model, groups, samples, packing == "one_document")
            for got, whole in zip(hidden, want_hidden, strict=True):
                # The host averages gradients over the ranks, so the loss is multiplied by their number.
                part = local_part(whole, layout, world_size, rank, 0)
                assert part.any(), "the first tokens reach the last rank's loss"
                assert_close(f"{where} d embedded", got / world_size, part, FP32_SHARDED)
            check_grads(where, model, want)
            # Only the last layer's keys and values, and all that is below, reach tokens of other ranks.
            below = [name for name in own if name.split(".")[0] == "embedding" or "layers.1." not in name]
            below = [name for name in below if "final_layernorm" not in name and "output_layer" not in name]
            assert len(below) > 10 and all(own[name].any() for name in below), where


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp", (2, 4))
def test_loss_on_the_last_rank_reaches_the_first(cp, mode):
    """Rank 0's tokens and parameters get gradients, and every gradient is that of one rank."""
    one_rank(cp)
    run_ranks(check_last_rank_loss, cp, mode)


def check_documents(rank, world_size, packings, overrides, tolerance):
    with make_groups(cp=world_size) as groups:
        for mode, layout, packing in product(MODES, LAYOUTS, packings):
            case, (sample, _) = PACKINGS[packing], make_samples(packing)
            model = build(groups, mode, layout, **overrides)
            before = logits_of(model, groups.cp, sample, packed=True)[0]
            places = local_part(torch.arange(case.seq_len), layout, world_size, rank, 0)
            for start, end in pairwise(case.cu_seqlens):
                tokens = sample["tokens"].clone()
                tokens[:, start:end] = (tokens[:, start:end] + 1) % VOCAB
                after = logits_of(model, groups.cp, sample | {"tokens": tokens}, packed=True)[0]
                change = (after - before).abs().amax(1) / before.square().mean().sqrt()
                inside = (places >= start) & (places < end)
                where = f"{mode} {layout} rank {rank} document {start}..{end}"
                reached, missed = change > tolerance, change < 1e-3
                assert not reached[~inside].any(), f"{where} reaches {places[~inside & reached].tolist()}"
                assert not missed[inside].any(), f"{where} does not reach {places[inside & missed].tolist()}"


@pytest.mark.parametrize("cp", (1, 2, 4))
def test_documents_do_not_touch_each_other(cp):
    """Changing one document's tokens leaves every other document's logits bit-identical."""
    run_ranks(check_documents, cp, DOCUMENTS, {}, EXACT)


def test_documents_share_experts_and_nothing_else():
    """With experts, rounding is all that changes elsewhere.

    An expert's matrix product has as many rows as tokens chose it, and one of another size may round
    otherwise, so the last bits of other documents can move.
    """
    run_ranks(check_documents, 4, DOCUMENTS[:1], MOE, FP32_SHARDED)
