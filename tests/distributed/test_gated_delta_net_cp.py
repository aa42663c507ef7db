"""GatedDeltaNet on several ranks against the per-token float64 reference.

Every case compares the output, the input gradient and every parameter gradient, with random upstream
gradients, on every rank. One set of ranks runs all packings, since starting ranks costs more than a case.
"""

from itertools import product

import pytest
import torch

from megatron_gdn.gated_delta_net import GatedDeltaNet
from megatron_gdn.layer_specs import LocalBackend, _gated_delta_net_spec
from megatron_gdn.stream import StreamParams, StreamPlan
from tests.helpers.cases import BF16_FACTOR, FP32_TRUTH, GVA_HEADS, HEADS, PACKINGS
from tests.helpers.compare import assert_close, assert_no_worse, local_part, relative_rms, summed_grads
from tests.helpers.distributed import alone, make_groups, run_ranks
from tests.helpers.gdn import Truth, config_for, tp_shard, truth

MODES = ("headwise", "chunkwise")
LAYOUTS = ("zigzag", "contiguous")


def build(config, mode, groups, params, sizes) -> GatedDeltaNet:
    """The layer through its spec, with this rank's part of `params`."""
    spec = _gated_delta_net_spec(LocalBackend(), mode)
    layer = spec(config=config, layer_number=1, pg_collection=groups)
    tp, rank = groups.tp.size(), groups.tp.rank()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(tp_shard(name, params[name], sizes, tp, rank))
    return layer


def run_layer(layer, config, groups, packing, want: Truth, dtype=torch.float32):
    """Output and input gradient of this rank, [s, B, hidden]; parameter gradients are left on the layer."""
    case = PACKINGS[packing]
    cp, rank = groups.cp.size(), groups.cp.rank()
    device = layer.A_log.device
    plan = StreamPlan(config.cp_layout, cp, rank, case.seq_len, case.batch, case.borders, device)
    mine = [
        local_part(x, config.cp_layout, cp, rank, 1).transpose(0, 1) for x in (want.hidden, want.upstream)
    ]
    hidden, upstream = (x.to(device, dtype).contiguous() for x in mine)
    if config.sequence_parallel:
        hidden, upstream = (x.chunk(groups.tp.size())[groups.tp.rank()] for x in (hidden, upstream))
    hidden.requires_grad_()
    output, _ = layer(hidden, packed_seq_params=StreamParams(qkv_format="sbhd", plan=plan))
    output.backward(upstream)
    return output, hidden.grad


def expected_part(x, config, groups):
    """This rank's part of a whole-stream tensor [B, S, ...] as the layer gives it."""
    part = local_part(x, config.cp_layout, groups.cp.size(), groups.cp.rank(), 1).transpose(0, 1)
    return part.chunk(groups.tp.size())[groups.tp.rank()] if config.sequence_parallel else part


def check_case(groups, config, mode, packing, heads, tolerance=FP32_TRUTH):
    """One case on this rank, fp32 against fp64."""
    sizes, want = GVA_HEADS[heads], truth(packing, heads)
    layer = build(config, mode, groups, want.params, sizes)
    output, hidden_grad = run_layer(layer, config, groups, packing, want)
    where = f"{packing} {heads} {mode} {config.cp_layout}"
    f32 = torch.float32
    assert_close(f"{where} output", output, expected_part(want.output, config, groups), tolerance, dtype=f32)
    expected = expected_part(want.hidden_grad, config, groups)
    assert_close(f"{where} d hidden", hidden_grad, expected, tolerance, dtype=f32)
    grads = summed_grads(layer.named_parameters(), groups.cp)
    if config.sequence_parallel:  # the host sums these over tp, see its finalize_model_grads
        torch.distributed.all_reduce(grads["out_norm.weight"], group=groups.tp)
    for name, grad in grads.items():
        expected = tp_shard(name, want.param_grads[name], sizes, groups.tp.size(), groups.tp.rank())
        assert_close(f"{where} d {name}", grad, expected, tolerance, dtype=f32)


def legal(mode: str, heads: str, cp: int, tp: int = 1) -> bool:
    key_heads, value_heads = (n // tp for n in GVA_HEADS[heads][:2])
    return mode == "chunkwise" or (value_heads % cp == 0 and (key_heads % cp == 0 or cp % key_heads == 0))


def check_all(rank, world_size, heads, tp, cp, sequence_parallel, packings):
    with make_groups(tp=tp, cp=cp) as groups:
        for layout in LAYOUTS:
            config = config_for(
                GVA_HEADS[heads], tp=tp, cp=cp, cp_layout=layout, sequence_parallel=sequence_parallel
            )
            for mode in MODES:
                assert legal(mode, heads, cp, tp)
                for packing in packings:
                    check_case(groups, config, mode, packing, heads)


@pytest.mark.parametrize("heads", GVA_HEADS)
@pytest.mark.parametrize("cp", (1, 2, 4))
def test_gated_delta_net_matches_reference(cp, heads):
    """Both modes and layouts give the reference's output and gradients, whatever the documents."""
    for packing in PACKINGS:
        truth(packing, heads)  # once here, inherited by the ranks
    run_ranks(check_all, cp, heads, 1, cp, False, tuple(PACKINGS))


@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_gated_delta_net_matches_reference_with_tensor_parallel(sequence_parallel):
    """The same on tp 2 x cp 2, with and without sequence parallelism."""
    packings = ("one_document", "borders_off_spans", "short_across_border", "batch_of_2")
    for packing in packings:
        truth(packing, "gva2")
    run_ranks(check_all, 4, "gva2", 2, 2, sequence_parallel, packings)


def check_bf16(rank, world_size, heads, tp, packings, device="cpu"):
    sizes = HEADS[heads]
    with make_groups(tp=tp, cp=world_size // tp) as groups:
        solo = alone(groups)

        def run(where, mode, layout, packing):
            size, want = where.tp.size(), truth(packing, heads)
            parallel = {"tp": size, "cp": where.cp.size(), "sequence_parallel": size > 1}
            config = config_for(sizes, cp_layout=layout, **parallel)
            layer = build(config, mode, where, want.params, sizes).to(device, torch.bfloat16)
            output, hidden_grad = run_layer(layer, config, where, packing, want, torch.bfloat16)
            grads = summed_grads(layer.named_parameters(), where.cp)
            if size > 1:
                torch.distributed.all_reduce(grads["out_norm.weight"], group=where.tp)
            return config, output, hidden_grad, grads

        for packing in packings:
            want = truth(packing, heads)
            _, whole, whole_grad, whole_grads = run(solo, MODES[0], LAYOUTS[0], packing)
            for layout, mode in product(LAYOUTS, MODES):
                config, output, hidden_grad, grads = run(groups, mode, layout, packing)
                where = f"{packing} {mode} {layout}"
                for name, got, unsharded, exact in (
                    ("output", output, whole, want.output),
                    ("d hidden", hidden_grad, whole_grad, want.hidden_grad),
                ):
                    part = expected_part(unsharded.transpose(0, 1), config, groups)
                    truth_part = expected_part(exact, config, groups)
                    assert_no_worse(f"{where} {name}", got, part, truth_part, BF16_FACTOR)
                for name, exact in want.param_grads.items():
                    unsharded = whole_grads[name]
                    assert relative_rms(unsharded, exact) < 0.1  # the comparison itself is sound
                    part, truth_part = (
                        tp_shard(name, x, sizes, tp, groups.tp.rank()) for x in (unsharded, exact)
                    )
                    assert_no_worse(f"{where} d {name}", grads[name], part, truth_part, BF16_FACTOR)


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_gated_delta_net_bf16_adds_no_rounding(cp, tp):
    """In bf16 the sharded layer is at most twice as far from the truth as the unsharded one."""
    truth("borders_off_spans", "gva2")
    run_ranks(check_bf16, cp * tp, "gva2", tp, ("borders_off_spans",))
