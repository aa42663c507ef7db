"""The checks of tests/distributed on any backend: sharded results against unsharded ones and the truth."""

from itertools import product

from tests.benchmarks.several_gpus.launch import GPU, Launcher
from tests.distributed import test_attention_cp, test_gated_delta_net_cp, test_layer_specs_cp
from tests.helpers.cases import FP32_SHARDED
from tests.helpers.compare import assert_close
from tests.helpers.distributed import alone, make_groups

DENSE, PACKED = ("one_document", "batch_of_2"), ("borders_off_spans", "several_chunks")
COMM_TYPES = test_attention_cp.COMM_TYPES


def check_model(rank: int, world_size: int, packing: str, device: str) -> None:
    """Loss and every gradient of a small MoE model in fp32, all ways to use CP, against one rank's."""
    with make_groups(cp=world_size) as groups:
        solo = alone(groups)
        specs, layouts = test_layer_specs_cp.SPECS, test_attention_cp.LAYOUTS
        model = test_layer_specs_cp.build_model(specs[0], solo, None, **EIGHT_HEADS)
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
        want_loss, want = test_layer_specs_cp.forward_backward(model.to(device), solo, packing)
        for spec, layout, comm in product(specs, layouts, COMM_TYPES):
            model = test_layer_specs_cp.build_model(spec, groups, state, layout, comm, **EIGHT_HEADS)
            loss, grads = test_layer_specs_cp.forward_backward(model.to(device), groups, packing)
            where = f"{spec} {layout} {comm} {packing}"
            assert_close(f"{where} loss", loss, want_loss, FP32_SHARDED)
            for name, grad in grads.items():
                assert_close(f"{where} d {name}", grad, want[name], FP32_SHARDED)


EIGHT_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
"""So that headwise can share them out over 8 ranks."""


def arguments(launcher: Launcher) -> tuple[tuple[str, ...], str, str]:
    """Packings, device and heads of `checks`: all on GPUs, and of the head dim that their kernels take."""
    return (DENSE + PACKED, "cuda", "kernels") if launcher is GPU else (PACKED[:1], "cpu", "gva2")


def checks(gpus: int, packings: tuple[str, ...], device: str, heads: str) -> dict[str, tuple]:
    """Name of each check to what `Launcher.run` takes."""
    whole = {f"CP {gpus}": 1}
    sizes = whole | ({f"CP {gpus // 2}, TP 2": 2} if gpus > 1 else {})
    layers = {
        "GatedDeltaNet layer": (test_gated_delta_net_cp.check_bf16, (heads,)),
        "attention layer": (test_attention_cp.check_layer_bf16, ()),
    }
    found = {}
    for (layer, (check, first)), (size, tp) in product(layers.items(), sizes.items()):
        found[f"{layer}, bf16, {size}"] = (check, gpus, *first, tp, packings, device)
    for packing in packings[:1] + packings[-1:]:
        found[f"MoE model of 4 layers, fp32, CP {gpus}, {packing}"] = (check_model, gpus, packing, device)
    return found


def run_checks(
    launcher: Launcher, gpus: int, packings: tuple[str, ...], device: str, heads: str
) -> dict[str, str]:
    """ "pass", or the failure's last line, of every check."""
    found = {}
    for name, call in checks(gpus, packings, device, heads).items():
        try:
            launcher.run(*call)
            found[name] = "pass"
        except AssertionError as error:
            print(f"{name}:\n{error}", flush=True)
            found[name] = f"FAIL: {str(error).strip().splitlines()[-1]}"
    return found
