"""A live model on another context-parallel group than it was built for, as for evaluation."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gdn.stream import StreamParams, cp_group_of
from tests.helpers.cases import EXACT, FP32_SHARDED
from tests.helpers.compare import assert_close, local_part
from tests.helpers.distributed import count_collectives, make_groups, run_ranks
from tests.helpers.model import (
    DENSE_MODEL,
    check_grads,
    cut,
    logits_of,
    make_model,
    make_samples,
    train_step,
    whole_tensors,
)

PACKED, DENSE = "borders_off_spans", "batch_of_2"
MODES = ("headwise", "chunkwise")
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0}


def subgroups() -> list:
    """Groups of 1 and of 2 neighbours."""
    return [torch.distributed.new_subgroups(size)[0] for size in (1, 2)]


def evaluate(model, groups, group, sample, packed, where):
    """Logits of this rank on `group`, which the model gets to know in every way that there is."""
    part = cut(sample, model.config, group, packed)
    hosts = PackedSeqParams(
        qkv_format="thd" if packed else "sbhd",
        cu_seqlens_q=part.params.cu_seqlens_q,
        cp_group=group,
        local_cp_size=group.size(),
    )
    part.params.cp_group = group
    logits = {}
    with torch.no_grad():
        for name, params in {"ours": part.params, "host's": hosts}.items():
            logits[name] = model(part.tokens, part.position_ids, None, packed_seq_params=params)
    built_for, groups.cp = groups.cp, group  # in the collection that all modules hold
    logits["rebound"] = logits_of(model, group, sample, packed)
    groups.cp = built_for
    for name, other in logits.items():
        assert_close(f"{where} {name}", other, logits["ours"], EXACT)
    return logits["ours"]


def check_evaluation(rank, world_size, mode):
    with make_groups(cp=world_size) as groups:
        for layout, packing in (("zigzag", PACKED), ("contiguous", DENSE)):
            model = make_model(groups, mode, cp_layout=layout, **MTP)
            samples, packed = make_samples(packing), packing == PACKED
            first = logits_of(model, groups.cp, samples[0], packed)
            solo, pair = subgroups()
            whole = [evaluate(model, groups, solo, sample, packed, "one rank") for sample in samples]
            for group in (pair, groups.cp):
                where = f"{mode} {layout} on {group.size()}"
                number = rank // group.size()  # other groups, other samples
                got = evaluate(model, groups, group, samples[number], packed, where)
                want = local_part(whole[number], layout, group.size(), group.rank(), 1)
                assert_close(where, got, want, FP32_SHARDED)
            assert_close("before and after", got, first, EXACT)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_on_other_groups(mode):
    """Built for 4 ranks, run on 1, on 2 and on 4 again: the same logits, on 4 bit for bit."""
    run_ranks(check_evaluation, 4, mode)


def check_training(rank, world_size, per_token):
    with make_groups(cp=world_size) as groups:
        solo, pair = subgroups()
        model = make_model(groups, "chunkwise", calculate_per_token_loss=per_token, **MTP)
        samples = make_samples(PACKED)
        loss = train_step(model, groups, samples, True, cp_group=solo)
        want = {key: grad.clone() for key, grad in whole_tensors(model, grads=True).items()}
        for group in (pair, None):
            assert_close("loss", train_step(model, groups, samples, True, cp_group=group), loss, FP32_SHARDED)
            check_grads(f"group of {(group or groups.cp).size()}", model, want)


@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_on_other_groups(per_token):
    """Ranks of one group of 4 as 4 or 2 groups with the same stream: the same gradients, MTP's too."""
    run_ranks(check_training, 4, per_token)


def check_refusals(rank, world_size):
    """What each rank says, and the collectives that it had called by then."""
    with make_groups(cp=2) as groups:
        (sample, _), (solo, _) = make_samples(PACKED), subgroups()
        model = make_model(groups, "headwise", linear_num_value_heads=2, **DENSE_MODEL)
        all_ranks = torch.distributed.group.WORLD

        def part_for(cut_for, told):
            part = cut(sample, model.config, cut_for, packed=True)
            part.params.cp_group = told
            return part

        said = []
        for part in (part_for(solo, None), part_for(groups.cp, solo), part_for(all_ranks, all_ranks)):
            with count_collectives() as log, pytest.raises(ValueError) as error:
                model(part.tokens, part.position_ids, None, packed_seq_params=part.params)
            assert not log
            said.append(str(error.value))
        layer = model.module.decoder.layers[0].self_attention
        with pytest.raises(TypeError, match="pg_collection"):  # not swallowed, as by a layer that takes all
            layer(torch.zeros(64, 1, 64), pg_collection=groups)
        with pytest.raises(ValueError) as error:
            cp_group_of(StreamParams(qkv_format="thd", local_cp_size=1), groups.cp)
        return [*said, str(error.value)]


def test_a_group_that_does_not_fit_is_refused():
    """On every rank, before the first collective."""
    for said in run_ranks(check_refusals, 4):
        cut_for_one, told_one, too_many, size_only = said
        assert "the CP group is the model's or" in cut_for_one and "the CP group is" in told_one
        assert "--context-parallel-size 4 with headwise CP needs the value heads" in too_many
        assert "local_cp_size 1 is not the size of the context-parallel group, 2" in size_only
