"""Attention on several ranks against the per-token float64 reference.

Outputs and all gradients, with random upstream gradients, on every rank. One set of ranks runs all
packings, since starting ranks costs more than a case.
"""

from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron_gdn import attention_cp, cpu
from megatron_gdn.attention import CPCoreAttention, GatedSelfAttention
from megatron_gdn.config import Qwen35Config
from megatron_gdn.cp_layout import local_ranges
from megatron_gdn.layer_specs import LocalBackend, _attention_spec
from megatron_gdn.stream import StreamParams, StreamPlan
from tests.helpers.cases import BF16_FACTOR, EXACT, FP32_TRUTH, PACKINGS
from tests.helpers.compare import assert_close, assert_no_worse, local_part, relative_rms, summed_grads
from tests.helpers.distributed import alone, count_collectives, make_groups, run_ranks
from tests.helpers.reference import AttentionSizes, attention_reference, gated_attention_reference

LAYOUTS = ("zigzag", "contiguous")
COMM_TYPES = ("p2p", "all_gather")
CPU = torch.device("cpu")
SIZES = AttentionSizes(num_heads=8, num_query_groups=2, head_dim=16)
HIDDEN = 24
NORM_EPS = 1e-6


def config_for(*, tp: int = 1, cp: int = 1, **overrides) -> Qwen35Config:
    """A small config whose attention layers have `SIZES`."""
    return Qwen35Config.from_size(
        "debug",
        **{
            "hidden_size": HIDDEN,
            "num_attention_heads": SIZES.num_heads,
            "num_query_groups": SIZES.num_query_groups,
            "kv_channels": SIZES.head_dim,
            "layernorm_epsilon": NORM_EPS,
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "use_cpu_initialization": True,
            "transformer_impl": "local",
            **overrides,
        },
    )


def mine(x, layout, group):
    """This rank's part [s, B, ...] of a whole stream [B, S, ...]."""
    return local_part(x, layout, group.size(), group.rank(), 1).transpose(0, 1)


# The core attention.


@cache
def core_truth(packing: str):
    """(q, k, v, upstream gradient, o, dq, dk, dv) of a case in float64, [B, S, heads, D]."""
    case = PACKINGS[packing]
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, packing)))
        # exact in bfloat16, so that every dtype starts from the same numbers
        q, k, v, do = (
            torch.randn(case.batch, case.seq_len, n, SIZES.head_dim).bfloat16().double()
            for n in (SIZES.num_heads, SIZES.num_query_groups, SIZES.num_query_groups, SIZES.num_heads)
        )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = attention_reference(*leaves, case.positions, SIZES.head_dim**-0.5)
    grads = torch.autograd.grad(o, leaves, do)
    return tuple(x.detach() for x in (q, k, v, do, o, *grads))


def core_attention(config, groups, cp_comm_type) -> CPCoreAttention:
    return CPCoreAttention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=cp_comm_type,
        softmax_scale=None,
        pg_collection=groups,
    )


def run_core(config, groups, cp_comm_type, packing, dtype):
    """Output [s, B, H * D] and gradients of q, k and v of this rank, as the host would call it."""
    case, group = PACKINGS[packing], groups.cp
    q, k, v, do = (mine(x, config.cp_layout, group).to(dtype) for x in core_truth(packing)[:4])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    params = None
    if case.cu_seqlens:
        borders = torch.tensor(case.cu_seqlens, dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    layer = core_attention(config, groups, cp_comm_type)
    o = layer(*leaves, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)
    return o.detach(), *torch.autograd.grad(o, leaves, do.flatten(2))


def core_expected(config, groups, packing):
    """What `run_core` should give."""
    o, *grads = (mine(x, config.cp_layout, groups.cp) for x in core_truth(packing)[4:])
    return o.flatten(2), *grads


def check_core(rank, world_size):
    with make_groups(cp=world_size) as groups:
        for layout in LAYOUTS:
            config = config_for(cp=world_size, cp_layout=layout)
            for cp_comm_type in COMM_TYPES:
                for packing in PACKINGS:
                    got = run_core(config, groups, cp_comm_type, packing, torch.float32)
                    want = core_expected(config, groups, packing)
                    for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
                        where = f"{packing} {cp_comm_type} {layout} {name}"
                        assert_close(where, g, w, FP32_TRUTH, dtype=torch.float32)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_core_attention_matches_reference(cp):
    """Output, dq, dk and dv, on both layouts and both ways to move keys, whatever the documents."""
    for packing in PACKINGS:
        core_truth(packing)  # once here, inherited by the ranks
    run_ranks(check_core, cp)


def check_core_bf16(rank, world_size, packings):
    with make_groups(cp=world_size) as groups:
        solo = dist.new_subgroups(1)[0]
        cp_group = groups.cp
        for layout in LAYOUTS:
            config = config_for(cp=world_size, cp_layout=layout)
            for packing in packings:
                groups.cp = solo
                unsharded = run_core(config, groups, None, packing, torch.bfloat16)
                for cp_comm_type in COMM_TYPES:
                    groups.cp = cp_group
                    got = run_core(config, groups, cp_comm_type, packing, torch.bfloat16)
                    want = core_expected(config, groups, packing)
                    for name, g, u, w in zip(("o", "dq", "dk", "dv"), got, unsharded, want, strict=True):
                        u = mine(u.transpose(0, 1), layout, groups.cp)
                        assert relative_rms(u, w) < 0.01  # the comparison itself is sound
                        where = f"{packing} {cp_comm_type} {layout} {name}"
                        assert_no_worse(where, g, u, w, BF16_FACTOR)


@pytest.mark.parametrize("cp", [2, 4])
def test_core_attention_bf16_adds_no_rounding(cp):
    """In bf16 the sharded attention is at most twice as far from the truth as the unsharded one."""
    packings = ("one_document", "borders_off_spans", "many_short", "several_chunks", "batch_of_2")
    for packing in packings:
        core_truth(packing)
    run_ranks(check_core_bf16, cp, packings)


def test_core_attention_in_many_rectangles(monkeypatch):
    """Long runs of keys are cut, which changes nothing but rounding."""
    monkeypatch.setattr(attention_cp, "KEYS_AT_ONCE", 24)
    for packing in PACKINGS:
        core_truth(packing)
    run_ranks(check_core, 4)


# What is sent.


def count_core(config, groups, cp_comm_type, packing, dtype):
    """Bytes that this rank sends in forward and in backward, and the number of its calls."""
    case, cp = PACKINGS[packing], groups.cp
    plan = StreamPlan(config.cp_layout, cp.size(), cp.rank(), case.seq_len, case.batch, case.borders, CPU)
    q, k, v, do = (mine(x, config.cp_layout, cp).to(dtype) for x in core_truth(packing)[:4])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    layer = core_attention(config, groups, cp_comm_type)
    with count_collectives() as forward:
        o = layer(*leaves, packed_seq_params=StreamParams(qkv_format="sbhd", plan=plan))
    with count_collectives() as backward:
        o.backward(do.flatten(2))
    return forward.sent_bytes(), backward.sent_bytes(), len(forward), len(backward)


@cache
def keys_looked_at(packing: str, layout: str, cp: int) -> dict[tuple[int, int], int]:
    """For (rank, owner): keys of the owner that the rank's queries see outside their span; by token."""
    case = PACKINGS[packing]
    position = case.positions[0].tolist()
    span_of = {
        token: (rank, start)
        for rank in range(cp)
        for start, end in local_ranges(layout, cp, rank, case.seq_len)
        for token in range(start, end)
    }
    seen = {(rank, owner): set() for rank in range(cp) for owner in range(cp)}
    for query, (rank, span) in span_of.items():
        for key in range(query - position[query], span):
            seen[rank, span_of[key][0]].add(key)
    return {pair: len(keys) for pair, keys in seen.items()}


def check_counts(rank, world_size, packings, dtypes):
    cp = world_size
    with make_groups(cp=cp) as groups:
        for packing in packings:
            for layout in LAYOUTS:
                config = config_for(cp=cp, cp_layout=layout)
                looked_at = keys_looked_at(packing, layout, cp)
                turns = {(a - b) % cp for (a, b), keys in looked_at.items() if keys and a != b}
                elements = 2 * SIZES.num_query_groups * SIZES.head_dim * PACKINGS[packing].batch
                given = elements * sum(looked_at[peer, rank] for peer in range(cp) if peer != rank)
                taken = elements * sum(looked_at[rank, peer] for peer in range(cp) if peer != rank)
                calls = {"p2p": len(turns), "all_gather": min(len(turns), 1)}
                most = max(sum(looked_at[a, b] for b in range(cp)) for a in range(cp))
                if most <= PACKINGS[packing].seq_len // cp:
                    calls["p2p"] = calls["all_gather"]
                for cp_comm_type in COMM_TYPES:
                    for dtype in dtypes:
                        got = count_core(config, groups, cp_comm_type, packing, dtype)
                        there, back = given * dtype.itemsize, taken * 4
                        want = (there, there + back, calls[cp_comm_type], 2 * calls[cp_comm_type])
                        assert got == want, (packing, layout, cp_comm_type, dtype)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_communication(cp):
    """Only keys that a rank looks at go to it, and again in backward; their fp32 gradients return."""
    for packing in PACKINGS:
        core_truth(packing)
    run_ranks(check_counts, cp, tuple(PACKINGS), (torch.float32,))
    run_ranks(check_counts, cp, ("one_document", "batch_of_2"), (torch.bfloat16,))


# The whole layer.


@cache
def layer_truth(packing: str):
    """(hidden, upstream, params, output, d hidden, d params) of a case in float64, batch first."""
    case = PACKINGS[packing]
    num_heads, num_groups, head_dim = SIZES
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, packing)))
        params = {
            "linear_qkv.weight": torch.randn(2 * (num_heads + num_groups) * head_dim, HIDDEN) / HIDDEN**0.5,
            "q_layernorm.weight": torch.randn(head_dim) / 4,
            "k_layernorm.weight": torch.randn(head_dim) / 4,
            "linear_proj.weight": torch.randn(HIDDEN, num_heads * head_dim) / (num_heads * head_dim) ** 0.5,
        }
        params = {name: p.bfloat16().double().requires_grad_() for name, p in params.items()}
        hidden, upstream = (
            torch.randn(case.batch, case.seq_len, HIDDEN).bfloat16().double() for _ in range(2)
        )
    output = gated_attention_reference(
        hidden.requires_grad_(),
        params,
        SIZES,
        eps=NORM_EPS,
        zero_centered=True,
        rotary_percent=0.25,
        rotary_base=10_000,
        positions=case.positions,
    )
    hidden_grad, *grads = torch.autograd.grad(output, [hidden, *params.values()], upstream)
    plain = {name: p.detach() for name, p in params.items()}
    return (
        hidden.detach(),
        upstream,
        plain,
        output.detach(),
        hidden_grad,
        dict(zip(params, grads, strict=True)),
    )


def tp_shard(name, full, tp):
    """The part of a parameter, or of its gradient, that a tensor-parallel rank holds."""
    if "layernorm" in name:
        return full
    return full.chunk(tp.size(), dim=1 if name == "linear_proj.weight" else 0)[tp.rank()]


def build(config, groups, params, cp_comm_type=None) -> GatedSelfAttention:
    """The layer through its spec, with this rank's part of `params`."""
    layer = _attention_spec(LocalBackend())(
        config=config, layer_number=1, pg_collection=groups, cp_comm_type=cp_comm_type
    )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(tp_shard(name, params[name], groups.tp))
    return layer


def layer_part(x, config, groups):
    """This rank's part of [B, S, hidden] as the layer takes and gives it."""
    part = mine(x, config.cp_layout, groups.cp)
    return part.chunk(groups.tp.size())[groups.tp.rank()] if config.sequence_parallel else part


def run_layer(layer, config, groups, packing, dtype):
    """Output and input gradient [s, B, hidden], and parameter gradients summed as the host sums them."""
    case, cp = PACKINGS[packing], groups.cp
    device = layer.linear_qkv.weight.device
    plan = StreamPlan(config.cp_layout, cp.size(), cp.rank(), case.seq_len, case.batch, case.borders, device)
    hidden, upstream = (layer_part(x, config, groups).to(device, dtype) for x in layer_truth(packing)[:2])
    hidden = hidden.clone().requires_grad_()
    output, bias = layer(hidden, None, packed_seq_params=StreamParams(qkv_format="thd", plan=plan))
    assert bias is None
    output.backward(upstream)
    grads = summed_grads(layer.named_parameters(), cp)
    for name in ("q_layernorm.weight", "k_layernorm.weight"):  # see the host's finalize_model_grads
        dist.all_reduce(grads[name], group=groups.tp)
    return output.detach(), hidden.grad, grads


def check_layer(rank, world_size, tp, packings, sequence_parallel):
    cpu.enable()
    cp = world_size // tp
    with make_groups(tp=tp, cp=cp) as groups:
        for layout in LAYOUTS:
            config = config_for(tp=tp, cp=cp, cp_layout=layout, sequence_parallel=sequence_parallel)
            for cp_comm_type in COMM_TYPES:
                for packing in packings:
                    _, _, params, output, hidden_grad, param_grads = layer_truth(packing)
                    layer = build(config, groups, params, cp_comm_type)
                    got = run_layer(layer, config, groups, packing, torch.float32)
                    where = f"{packing} {cp_comm_type} {layout}"
                    for name, g, w in (("output", got[0], output), ("d hidden", got[1], hidden_grad)):
                        w = layer_part(w, config, groups)
                        assert_close(f"{where} {name}", g, w, FP32_TRUTH, dtype=torch.float32)
                    assert got[2].keys() == param_grads.keys()
                    for name, g in got[2].items():
                        w = tp_shard(name, param_grads[name], groups.tp)
                        assert_close(f"{where} d {name}", g, w, FP32_TRUTH, dtype=torch.float32)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_gated_self_attention_matches_reference(cp):
    """Output, input gradient and every parameter gradient summed over CP."""
    for packing in PACKINGS:
        layer_truth(packing)
    run_ranks(check_layer, cp, 1, tuple(PACKINGS), False)


@pytest.mark.parametrize(("tp", "cp", "sequence_parallel"), [(2, 2, False), (2, 2, True), (4, 1, True)])
def test_gated_self_attention_matches_reference_with_tensor_parallel(tp, cp, sequence_parallel):
    """The same with the heads shared out, also over more ranks than there are key/value heads."""
    packings = ("one_document", "borders_off_spans", "batch_of_2")
    for packing in packings:
        layer_truth(packing)
    run_ranks(check_layer, tp * cp, tp, packings, sequence_parallel)


def check_layer_bf16(rank, world_size, tp, packings, device="cpu"):
    cpu.enable()
    with make_groups(tp=tp, cp=world_size // tp) as groups:
        solo = alone(groups)

        def run(where, cp_comm_type, layout, packing):
            size, params = where.tp.size(), layer_truth(packing)[2]
            parallel = {"tp": size, "cp": where.cp.size(), "sequence_parallel": size > 1}
            config = config_for(cp_layout=layout, **parallel)
            layer = build(config, where, params, cp_comm_type).to(device, torch.bfloat16)
            return config, *run_layer(layer, config, where, packing, torch.bfloat16)

        for packing in packings:
            *_, output, hidden_grad, param_grads = layer_truth(packing)
            _, whole, whole_grad, whole_grads = run(solo, None, LAYOUTS[0], packing)
            for layout, cp_comm_type in product(LAYOUTS, COMM_TYPES):
                config, *got, grads = run(groups, cp_comm_type, layout, packing)
                where = f"{packing} {cp_comm_type} {layout}"
                for name, g, u, w in (
                    ("output", got[0], whole, output),
                    ("d hidden", got[1], whole_grad, hidden_grad),
                ):
                    assert relative_rms(u, w.transpose(0, 1)) < 0.05  # the comparison itself is sound
                    u, w = (layer_part(x, config, groups) for x in (u.transpose(0, 1), w))
                    assert_no_worse(f"{where} {name}", g, u, w, BF16_FACTOR)
                for name, w in param_grads.items():
                    u, w = (tp_shard(name, x, groups.tp) for x in (whole_grads[name], w))
                    assert_no_worse(f"{where} d {name}", grads[name], u, w, BF16_FACTOR)


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2)])
def test_gated_self_attention_bf16_adds_no_rounding(tp, cp):
    """In bf16 the sharded layer is at most twice as far from the truth as the unsharded one."""
    packings = ("borders_off_spans", "batch_of_2")
    for packing in packings:
        layer_truth(packing)
    run_ranks(check_layer_bf16, tp * cp, tp, packings)


def check_recompute(rank, world_size, packing):
    cpu.enable()
    with make_groups(cp=world_size) as groups:
        params, results = layer_truth(packing)[2], []
        for overrides in ({}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}):
            config = config_for(cp=world_size, **overrides)
            layer = build(config, groups, params)
            with count_collectives() as log:
                output, hidden_grad, grads = run_layer(layer, config, groups, packing, torch.float32)
            results.append(
                ({"output": output, "d hidden": hidden_grad, **grads}, log.calls("all_to_all_single"))
            )
        (plain, plain_shifts), (recomputed, shifts) = results
        for name, want in plain.items():
            assert_close(name, recomputed[name], want, EXACT)
        # zigzag on 2 ranks: one shift forward, two backward, and forward's once more
        assert (plain_shifts, shifts) == (3, 4)


def test_selective_recompute_changes_nothing():
    """--recompute-granularity selective runs the core attention again and gives the same bits."""
    layer_truth("borders_off_spans")
    run_ranks(check_recompute, 2, "borders_off_spans")
