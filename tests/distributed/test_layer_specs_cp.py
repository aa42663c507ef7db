"""A whole small model, built from the name that --spec says, gives the same on one rank and on several."""

from functools import cache

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import import_module

from megatron_gdn.config import Qwen35Config
from megatron_gdn.stream import StreamParams, StreamPlan
from tests.helpers.cases import FP32_SHARDED, PACKINGS
from tests.helpers.compare import assert_close, local_part, summed_grads
from tests.helpers.distributed import make_groups, run_ranks

SPECS = ("get_qwen35_headwise_cp_spec", "get_qwen35_chunkwise_cp_spec")
PACKED, DENSE = "borders_off_spans", "batch_of_2"
VOCAB = 96
MIXED = {"moe_layer_freq": [1, 0, 0, 1]}


def build_model(spec: str, groups, state, layout="zigzag", cp_comm_type="p2p", **overrides) -> GPTModel:
    """The model of `debug` size on these groups, with the parameters of `state`."""
    config = Qwen35Config.from_size(
        "debug",
        **{
            "context_parallel_size": groups.cp.size(),
            "cp_comm_type": cp_comm_type,
            "cp_layout": layout,
            "use_cpu_initialization": True,
            "perform_initialization": False,
            "transformer_impl": "local",
            **overrides,
        },
    )
    block = import_module(("megatron_gdn.layer_specs", spec))(config)
    model = GPTModel(config, block, VOCAB, 1024, position_embedding_type="none", pg_collection=groups)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name] if state else _start(name, parameter))
    return model


def _start(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Random, but with routers far from ties: rounding must not send a token to another expert."""
    scale = 1.0 if "router" in name or "embedding" in name else 0.05
    start = torch.randn_like(parameter) * scale
    return start.exp() if name.endswith("A_log") else start


def forward_backward(model: GPTModel, groups, packing: str):
    """Summed loss of the stream, and every parameter's gradient summed over CP ranks."""
    case, layout = PACKINGS[packing], model.config.cp_layout
    cp, rank = groups.cp.size(), groups.cp.rank()
    generator = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(VOCAB, (2, case.batch, case.seq_len), generator=generator)
    device = next(model.parameters()).device
    tokens, labels, positions = (
        local_part(x, layout, cp, rank, 1).to(device) for x in (tokens, labels, case.positions)
    )
    plan = StreamPlan(layout, cp, rank, case.seq_len, case.batch, case.borders, device)
    params = StreamParams(qkv_format="thd" if plan.packed else "sbhd", plan=plan)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones((), device=device))
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=params)
    loss = losses.sum() / (case.batch * case.seq_len)
    loss.backward()
    loss = loss.detach()
    torch.distributed.all_reduce(loss, group=groups.cp)
    return loss, summed_grads(model.named_parameters(), groups.cp)


@cache
def one_rank(packing: str, mixed: bool):
    """Parameters, loss and gradients of the unsharded model."""

    def run(rank, world_size):
        with make_groups() as groups:
            model = build_model(SPECS[0], groups, None, **(MIXED if mixed else {}))
            state = {name: p.detach().clone() for name, p in model.named_parameters()}
            return state, *forward_backward(model, groups, packing)

    return run_ranks(run, 1)[0]


def check(rank, world_size, packing, cases, overrides):
    state, want_loss, want_grads = one_rank(packing, bool(overrides))
    with make_groups(cp=world_size) as groups:
        for spec, layout, cp_comm_type in cases:
            model = build_model(spec, groups, state, layout, cp_comm_type, **overrides)
            loss, grads = forward_backward(model, groups, packing)
            where = f"{spec} {layout} {cp_comm_type} {packing}"
            assert_close(f"{where} loss", loss, want_loss, FP32_SHARDED)
            for name, grad in grads.items():
                assert_close(f"{where} d {name}", grad, want_grads[name], FP32_SHARDED)


CASES = tuple(
    (spec, layout, comm)
    for spec in SPECS
    for layout, comm in (("zigzag", "p2p"), ("zigzag", "all_gather"), ("contiguous", "p2p"))
)


@pytest.mark.parametrize("packing", (PACKED, DENSE))
@pytest.mark.parametrize("cp", (2, 4))
def test_moe_model_is_the_same_on_any_number_of_ranks(cp, packing):
    """Loss and every gradient of the MoE model, both GDN modes, layouts and attention exchanges."""
    one_rank(packing, False)
    cases = [case for case in CASES if cp == 2 or "headwise" not in case[0] or case[1] == "zigzag"]
    run_ranks(check, cp, packing, tuple(cases), {})


def test_model_with_dense_layers_is_the_same_on_two_ranks():
    """Dense feed-forward after a GatedDeltaNet layer and MoE after attention."""
    one_rank(PACKED, True)
    run_ranks(check, 2, PACKED, CASES, MIXED)
