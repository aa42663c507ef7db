"""Multi-token prediction trains the same on one rank and on several, and where the host's does not."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import multi_token_prediction as host
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, roll_tensor

from megatron_gdn import layer_specs
from megatron_gdn.attention import GatedSelfAttention
from megatron_gdn.config import Qwen35Config
from megatron_gdn.gated_delta_net import GatedDeltaNet
from megatron_gdn.layer_specs import get_qwen35_chunkwise_cp_spec, mtp_block_spec
from megatron_gdn.microbatch import cut_microbatch
from megatron_gdn.model import build_model
from megatron_gdn.norms import RMSNorm
from tests.helpers.cases import FP32_SHARDED, PACKINGS
from tests.helpers.compare import assert_close, relative_rms, summed_grads
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.model import VOCAB, make_samples

PACKED, DENSE = "borders_off_spans", "batch_of_2"
CPU = torch.device("cpu")


def small_config(**overrides) -> Qwen35Config:
    """Two layers of which GatedDeltaNet is the last, and one depth of multi-token prediction."""
    fixed = {
        "num_layers": 2,
        "linear_attention_freq": [0, 1],
        "num_moe_experts": 4,
        "mtp_num_layers": 1,
        "mtp_loss_scaling_factor": 1.0,  # as loud as the main loss
        "cp_comm_type": "p2p",
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "transformer_impl": "local",
    }
    return Qwen35Config.from_size("debug", **(fixed | overrides))


def make_model(groups, state, hosts=False, **overrides):
    """The model with the parameters of `state`, or random ones; `hosts`: with all of the host's MTP."""
    config = small_config(context_parallel_size=groups.cp.size(), **overrides)
    spec = get_qwen35_chunkwise_cp_spec
    if hosts:
        layers = mtp_block_spec(config)
        layers.layer_specs = [
            replace(each, module=host.MultiTokenPredictionLayer) for each in layers.layer_specs
        ]
        place = {"position_embedding_type": "none", "mtp_block_spec": layers, "pg_collection": groups}
        model = GPTModel(config, spec(config), VOCAB, 128, **place)
    else:
        whole = SimpleNamespace(
            transformer=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB,
            seq_length=128,
            fp16_lm_cross_entropy=False,
            parallel_output=True,
            share_embeddings_and_output_weights=False,
        )
        model = build_model(whole, groups)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name] if state else _start(name, parameter))
    return model


def _start(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Random, but with routers far from ties: rounding must not send a token to another expert."""
    start = torch.randn_like(parameter) * (1.0 if "router" in name or "embedding" in name else 0.05)
    return start.exp() if name.endswith("A_log") else start


def train_step(model, groups, samples, packed: bool, hosts=False):
    """Loss, MTP losses and gradients of a step, through the host's schedule and the script's loss.

    Returns:
        Mean main loss over all labels, MTP loss of each depth as the host logs it, and every gradient as
        the host's gradient buffers and `finalize_model_grads` would make it.
    """
    import pretrain_qwen35

    config, cp = model.config, groups.cp.size()
    pretrain_qwen35.get_args = lambda: SimpleNamespace(
        calculate_per_token_loss=config.calculate_per_token_loss
    )
    config.finalize_model_grads_func = None

    def forward_step(data, model):
        part = cut_microbatch(
            next(data),
            packed=packed,
            layout=config.cp_layout,
            cp_size=cp,
            cp_rank=groups.cp.rank(),
            device=CPU,
            mtp_num_layers=config.mtp_num_layers,
        )
        params = None if hosts and not packed else part.params
        extra = {"labels": part.labels, "loss_mask": part.loss_mask, "packed_seq_params": params}
        output = model(part.tokens, part.position_ids, None, **extra)
        return output, functools.partial(pretrain_qwen35.loss_func, part)

    MTPLossLoggingHelper.tracker.clear()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(samples),
        model=model,
        num_microbatches=len(samples),
        seq_length=samples[0]["tokens"].shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    torch.distributed.all_reduce(total, group=groups.cp)
    MTPLossLoggingHelper.reduce_metrics_in_tracker()
    mtp = MTPLossLoggingHelper.tracker["loss_values"] / len(samples)
    divide_by = total[1] if config.calculate_per_token_loss else cp
    grads = summed_grads(model.named_parameters(), groups.cp)
    return total[0] / total[1], mtp, {name: grad / divide_by for name, grad in grads.items()}


@functools.cache
def one_rank(packing: str, per_token: bool, depths: int = 1, hosts: bool = False):
    """Parameters, losses and gradients of the unsharded model."""

    def run(rank, world_size):
        with make_groups() as groups:
            options = {"calculate_per_token_loss": per_token, "mtp_num_layers": depths}
            model = make_model(groups, None, hosts, **options)
            state = {name: p.detach().clone() for name, p in model.named_parameters()}
            return state, *train_step(model, groups, make_samples(packing), packing == PACKED, hosts)

    return run_ranks(run, 1)[0]


def check_equal(where: str, got, want) -> None:
    """Losses and gradients of two runs."""
    for name, mine, theirs in zip(("loss", "mtp loss"), got, want, strict=False):
        assert_close(f"{where} {name}", mine, theirs, FP32_SHARDED)
    for name, grad in got[-1].items():
        assert_close(f"{where} d {name}", grad, want[-1][name], FP32_SHARDED)


def check_ranks(rank, world_size, packing, depths):
    with make_groups(cp=world_size) as groups:
        for per_token in (False, True):
            state, *want = one_rank(packing, per_token, depths)
            for layout in ("zigzag", "contiguous"):
                model = make_model(
                    groups,
                    state,
                    cp_layout=layout,
                    calculate_per_token_loss=per_token,
                    mtp_num_layers=depths,
                )
                got = train_step(model, groups, make_samples(packing), packing == PACKED)
                check_equal(f"{layout} per token {per_token}", got, want)


@pytest.mark.parametrize(("cp", "packing", "depths"), [(2, PACKED, 2), (2, DENSE, 1), (4, PACKED, 1)])
def test_mtp_is_the_same_on_any_number_of_ranks(cp, packing, depths):
    """Loss, MTP loss and every gradient, both layouts, both ways to divide the loss."""
    for per_token in (False, True):
        one_rank(packing, per_token, depths)
    run_ranks(check_ranks, cp, packing, depths)


@pytest.mark.parametrize("per_token", [False, True])
def test_mtp_is_the_hosts_on_one_rank(per_token):
    """Without packing and without context parallelism the host is right, and we compute the same."""
    _, *want = one_rank(DENSE, per_token, hosts=True)
    check_equal("host", one_rank(DENSE, per_token)[1:], want)


def check_documents(rank, world_size):
    """(MTP loss of packed documents, mean over the same documents as streams of their own)."""
    (sample, _), borders = make_samples(PACKED), PACKINGS[PACKED].borders
    with make_groups() as groups:
        model = make_model(groups, None)
        packed = train_step(model, groups, [sample], packed=True)[1]
        total, targets = torch.zeros(1), 0
        for start, end in zip(borders, borders[1:], strict=False):
            alone = {name: tensor[:, start:end].clone() for name, tensor in sample.items()}
            if end < borders[-1]:
                alone["loss_mask"][:, -1] = 0  # the label that is in the next document
            count = alone["loss_mask"][:, 1:].sum()
            total += train_step(model, groups, [alone], packed=False)[1] * count
            targets += count
        return packed, total / targets


def test_mtp_of_packed_documents_is_that_of_each_alone():
    """No token, target or state comes from another document."""
    packed, alone = run_ranks(check_documents, 1)[0]
    assert_close("mtp loss", packed, alone, FP32_SHARDED)


def check_detached(rank, world_size):
    """Gradients with detached heads, and with a loss of multi-token prediction that weighs nothing."""
    with make_groups() as groups:
        state, grads = None, []
        for options in ({"mtp_detach_heads": True}, {"mtp_loss_scaling_factor": 0.0}):
            model = make_model(groups, state, moe_aux_loss_coeff=0.0, **options)
            state = {name: p.detach().clone() for name, p in model.named_parameters()}
            grads.append(train_step(model, groups, make_samples(DENSE), packed=False)[2])
        return grads


def test_detached_heads_train_nothing_but_themselves():
    """--mtp-detach-heads leaves embedding, decoder and output layer to the main loss."""
    detached, weightless = run_ranks(check_detached, 1)[0]
    for name, grad in detached.items():
        if name.startswith("mtp."):
            assert grad.any() and not weightless[name].any(), name
        else:
            assert_close(name, grad, weightless[name], FP32_SHARDED)


def host_divides_by_own_targets(rank, world_size):
    """Relative error of the host's MTP gradient."""
    state, *want = one_rank(DENSE, False, hosts=True)
    with make_groups(cp=world_size) as groups:
        model = make_model(groups, state, hosts=True)
        got = train_step(model, groups, make_samples(DENSE), packed=False, hosts=True)
        grad = "mtp.layers.0.eh_proj.weight"
        return relative_rms(got[2][grad], want[2][grad])


def test_host_weighs_targets_by_their_rank():
    """Why the model has a loss of its own; if the host's ever passes on two ranks, it may go."""
    one_rank(DENSE, False, hosts=True)
    assert min(run_ranks(host_divides_by_own_targets, 2)) > 0.1


def host_rolls(rank, world_size):
    """(host's shift, right one) of packed zigzag spans, and of dense contiguous ones."""
    with make_groups(cp=world_size) as groups:
        pairs = []
        for packing, layout in ((PACKED, "zigzag"), (DENSE, "contiguous")):
            sample, packed = make_samples(packing)[0], packing == PACKED
            part = cut_microbatch(
                sample,
                packed=packed,
                layout=layout,
                cp_size=world_size,
                cp_rank=rank,
                device=CPU,
                mtp_num_layers=1,
            )
            params = part.params if packed else None
            rolled = roll_tensor(part.tokens, cp_group=groups.cp, packed_seq_params=params)[0]
            pairs.append((rolled, part.params.ahead[0].tokens))
        return pairs


def test_host_shifts_wrongly_where_documents_or_layouts_are_not_its_own():
    """Why tokens are shifted before they are cut."""
    for pairs in run_ranks(host_rolls, 2):
        for rolled, right in pairs:
            assert (rolled != right).any()
    cu_seqlens = torch.tensor(PACKINGS[PACKED].borders)
    labels = torch.arange(1, 129).view(1, -1)  # of the tokens 0, 1, ...
    params = SimpleNamespace(cu_seqlens_q=cu_seqlens)
    rolled = roll_tensor(labels, packed_seq_params=params)[0]
    assert rolled[0, 21] == 23, "token 21 is in the first document, its target 23 is in the second"


def build_specs(rank, world_size):
    with make_groups():
        config = small_config()
        decoder = get_qwen35_chunkwise_cp_spec(config)
        hosts = get_gpt_mtp_block_spec_for_backend(config, decoder, SimpleBackend())
        mixers = [
            spec.layer_specs[0].submodules.mtp_model_layer.submodules.self_attention.module
            for spec in (hosts, mtp_block_spec(config))
        ]
        norms = mtp_block_spec(config).layer_specs[0].submodules
        assert {norms.enorm, norms.hnorm, norms.layer_norm} == {RMSNorm}
        assert mtp_block_spec(small_config(mtp_num_layers=None)) is None
        return [mixer.__name__ for mixer in mixers]


class SimpleBackend(layer_specs.LocalBackend):
    """Gives the host's MTP layer a norm though it does not say which."""

    def layer_norm(self, rms_norm=True, for_qk=False, has_residual=False):
        return super().layer_norm(rms_norm=True)


def test_mtp_layer_is_attention_after_any_layer():
    """The host repeats the stage's last layer, which may be GatedDeltaNet."""
    assert run_ranks(build_specs, 1)[0] == [GatedDeltaNet.__name__, GatedSelfAttention.__name__]
