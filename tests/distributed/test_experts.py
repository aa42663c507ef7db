"""The MoE layer on one rank and on several, with routers that leave experts and whole ranks idle."""

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend

from megatron_gdn.layer_specs import LocalBackend
from megatron_gdn.moe_layer import AlltoAllTokenDispatcher, moe_layer_spec
from tests.helpers.cases import BF16_FACTOR, EXACT, FP32_SHARDED, FP32_TRUTH
from tests.helpers.compare import assert_close, assert_no_worse
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.moe import (
    EXPERTS,
    NAMES,
    moe_config,
    moe_reference,
    part_of_rank,
    random_tokens,
    random_weights,
)

S, B = 12, 2
IDLE = {"none": (), "some": (0, 5), "half": (4, 5, 6, 7)}
"""Experts that get no token; "half" leaves the last expert-parallel rank of two without any."""
SIZES = {
    "one rank": {},
    "ep2": {"ep": 2},
    "etp2": {"tp": 2, "etp": 2},
    "tp2 ep2": {"tp": 2, "ep": 2},
    "ep2 etp2": {"tp": 2, "ep": 2, "etp": 2},
}
OPTIONS = {
    "plain": {},
    "overlap": {"moe_shared_expert_overlap": True},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "recompute": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
        "moe_grouped_gemm": True,
    },
}


def ranks_of(sizes: dict) -> int:
    return max(sizes.get("tp", 1), sizes.get("etp", 1) * sizes.get("ep", 1))


def groups_of(sizes: dict):
    return make_groups(
        tp=sizes.get("tp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp", 1),
    )


def build(config, groups, weights, host: bool = False):
    """Our layer, or the host's with one expert after another."""
    if host:
        spec = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=EXPERTS)
    else:
        spec = moe_layer_spec(config, LocalBackend(), local=True)
    layer = spec(config=config, pg_collection=groups, is_mtp_layer=False)
    layer.set_layer_number(1)
    state = {name: part_of_rank(key, weights[key], groups) for name, key in NAMES.items()}
    for name, whole in list(state.items()) if host else ():
        if name.startswith("experts."):
            del state[name]
            place = name.removeprefix("experts.")
            state |= {f"experts.local_experts.{i}.{place}": part for i, part in enumerate(whole)}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(state[name])
    return layer.to(config.params_dtype)


def run_layer(layer, tokens, upstream, groups):
    """Output, gradient of the tokens, and gradients by name, summed over the ranks that share a weight."""
    tokens = tokens.to(layer.config.params_dtype).requires_grad_()
    output, _ = layer(tokens)
    output.backward(upstream.to(output.dtype))
    grads = {}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad.float()
        shared = not name.startswith("experts.")
        if shared and (groups.dp.size() > 1 or getattr(parameter, "sequence_parallel", False)):
            group = groups.tp if getattr(parameter, "sequence_parallel", False) else groups.dp
            torch.distributed.all_reduce(grad, group=group)
            if group is groups.tp and groups.dp.size() > 1:
                torch.distributed.all_reduce(grad, group=groups.dp)
        elif not shared and groups.expt_dp.size() > 1:
            torch.distributed.all_reduce(grad, group=groups.expt_dp)
        grads[name] = grad
    return output.detach(), tokens.grad, grads


def check(rank, world_size, sizes, idle, options):
    with groups_of(sizes) as groups:
        config = moe_config(**sizes, **OPTIONS[options])
        weights = random_weights(IDLE[idle])
        whole, upstream = random_tokens(world_size * S, B), torch.randn(world_size * S, B, 32)
        exact = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        leaf = whole.clone().requires_grad_()
        want = moe_reference(leaf.flatten(0, 1), exact).view_as(whole)
        want.backward(upstream.double())
        layer = build(config, groups, weights)
        mine = slice(rank * S, (rank + 1) * S)
        output, d_tokens, grads = run_layer(layer, whole[mine].clone(), upstream[mine], groups)
        where = f"{sizes} {idle} {options}"
        assert_close(f"{where} output", output, want[mine], FP32_TRUTH, dtype=torch.float32)
        assert_close(f"{where} d tokens", d_tokens, leaf.grad[mine], FP32_TRUTH, dtype=torch.float32)
        assert grads.keys() == NAMES.keys()
        for name, grad in grads.items():
            part = part_of_rank(NAMES[name], exact[NAMES[name]].grad, groups)
            assert_close(f"{where} d {name}", grad, part, FP32_TRUTH, dtype=torch.float32)
        for expert in set(IDLE[idle]) if world_size == 1 else ():
            assert not layer.experts.linear_fc1.weight.grad[expert].any()


@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("sizes", SIZES)
def test_layer_matches_reference(sizes, idle):
    """Output and every gradient, with experts and whole ranks that get no token."""
    run_ranks(check, ranks_of(SIZES[sizes]), SIZES[sizes], idle, "plain")


@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "plain"])
@pytest.mark.parametrize("sizes", ("one rank", "ep2", "etp2"))
def test_layer_with_options_matches_reference(sizes, options):
    """Overlapped shared expert, all-gather dispatch, recomputed activation."""
    run_ranks(check, ranks_of(SIZES[sizes]), SIZES[sizes], "some", options)


def compare_with_host(rank, world_size, sizes, dtype):
    with groups_of(sizes) as groups:
        weights = random_weights(IDLE["some"])
        tokens, upstream = random_tokens(S, B), torch.randn(S, B, 32)
        runs = {}
        for key, kind, host in (("ours", dtype, False), ("host", dtype, True), ("fp32", torch.float32, True)):
            config = moe_config(
                **sizes, params_dtype=kind, bf16=kind == torch.bfloat16, bias_activation_fusion=True
            )
            output, d_tokens, grads = run_layer(
                build(config, groups, weights, host), tokens.clone(), upstream, groups
            )
            if host:
                for fc in ("linear_fc1", "linear_fc2"):
                    names = [
                        f"experts.local_experts.{i}.{fc}.weight" for i in range(EXPERTS // groups.ep.size())
                    ]
                    grads[f"experts.{fc}.weight"] = torch.stack([grads.pop(name) for name in names])
            runs[key] = {"output": output, "d tokens": d_tokens, **grads}
        for name, got in runs["ours"].items():
            if dtype == torch.float32:
                tolerance = EXACT if world_size == 1 else FP32_SHARDED
                assert_close(name, got, runs["host"][name], tolerance)
            else:
                assert_no_worse(name, got, runs["host"][name], runs["fp32"][name], BF16_FACTOR)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("sizes", ("one rank", "ep2", "etp2"))
def test_layer_is_the_hosts(sizes, dtype):
    """What the host's experts give: bit for bit in fp32 on one rank; in bf16 no further from fp32."""
    run_ranks(compare_with_host, ranks_of(SIZES[sizes]), SIZES[sizes], dtype)


def start_weights(rank, world_size, sizes):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with groups_of(sizes) as groups:
        for on_cpu in (True, False):
            config = moe_config(**sizes, perform_initialization=True, use_cpu_initialization=on_cpu)
            states = []
            for spec in (
                get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=EXPERTS),
                moe_layer_spec(config, LocalBackend(), local=True),
            ):
                torch.manual_seed(5)
                model_parallel_cuda_manual_seed(7)
                layer = spec(config=config, pg_collection=groups, is_mtp_layer=False)
                states.append(layer)
            host, ours = states
            for fc in ("linear_fc1", "linear_fc2"):
                weight = getattr(ours.experts, fc).weight
                for mine, expert in zip(weight, host.experts.local_experts, strict=True):
                    theirs = getattr(expert, fc).weight
                    assert_close(f"{fc} on_cpu={on_cpu}", mine, theirs, EXACT)
                    assert weight.allreduce == theirs.allreduce
                    assert weight.partition_dim == theirs.partition_dim + 1
                    assert weight.partition_stride == theirs.partition_stride
            ours.load_state_dict(host.state_dict())


@pytest.mark.parametrize("sizes", SIZES)
def test_experts_start_like_the_hosts(sizes):
    """Same random numbers and attributes for data and tensor parallelism; the host's state dict loads."""
    run_ranks(start_weights, ranks_of(SIZES[sizes]), SIZES[sizes])


def dispatcher_of(rank, world_size, overrides):
    with make_groups() as groups:
        spec = moe_layer_spec(moe_config(**overrides), LocalBackend(), local=True)
        layer = spec(config=moe_config(**overrides), pg_collection=groups, is_mtp_layer=False)
        return isinstance(layer.token_dispatcher, AlltoAllTokenDispatcher)


@pytest.mark.parametrize(
    ("overrides", "ours"),
    [
        ({}, True),
        ({"moe_expert_capacity_factor": 1.0}, False),
        ({"moe_token_dispatcher_type": "allgather"}, False),
    ],
)
def test_dispatcher_is_ours_where_it_applies(overrides, ours):
    """Token dropping keeps the host's, which knows tokens with fewer experts."""
    assert run_ranks(dispatcher_of, 1, overrides) == [ours]


@pytest.mark.parametrize(
    ("overrides", "flag"),
    [
        ({"gated_linear_unit": False}, "--swiglu"),
        ({"activation_func": torch.nn.functional.gelu}, "--swiglu"),
        (
            {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
            "--moe-apply-probs-on-input",
        ),
        ({"activation_func_clamp_value": 7.0}, "--activation-func-clamp-value"),
    ],
)
def test_experts_refuse_what_they_would_ignore(overrides, flag):
    """Flags of the host's experts that ours do not know."""
    with pytest.raises(AssertionError, match=flag):
        run_ranks(dispatcher_of, 1, overrides)
