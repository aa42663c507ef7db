"""The benchmarks of layers and of the model run from end to end on tiny sizes, and their counts count."""

import os
import sys

import pytest
import torch

from tests.benchmarks import (
    attention,
    attention_layer,
    gdn_layer,
    linear_cross_entropy,
    memory_share,
    moe_layer,
    run_gpu,
    runs,
    warm_kernels,
)
from tests.benchmarks import slice as model_slice
from tests.helpers.distributed import run_ranks


def in_a_process(main, folder) -> int:
    """Exit status of a benchmark in a process of its own, whose process groups and patches end with it."""

    def body(rank, world_size):
        torch.distributed.destroy_process_group()
        return main(["--tiny", "--results", str(folder)])

    return run_ranks(body, 1, timeout=600)[0]


@pytest.mark.skipif(not runs.RUNS_ON_CPU, reason="with a GPU run the benchmarks themselves")
@pytest.mark.parametrize(
    "module",
    [attention, attention_layer, gdn_layer, linear_cross_entropy, memory_share, model_slice, moe_layer],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_tables_are_written(module, tmp_path):
    """Every table is there with all its rows; memory's bound holds on a CPU too, times' need not."""
    name = module.__name__.rpartition(".")[2]
    status = in_a_process(module.main, tmp_path)
    text = (tmp_path / f"{name}.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    heads = {"gdn_layer": 2, "moe_layer": 2, "slice": 3}.get(name, 1)
    figures = {
        "attention": len(attention.CASES),
        "attention_layer": 2 + 4,
        "gdn_layer": 8 + 2,
        "linear_cross_entropy": 4,
        "memory_share": 8,
        "moe_layer": 2 + 8,
        "slice": 2 * 2 + 2,
    }[name]
    assert len(rows) == heads + figures, text
    if name == "memory_share":
        assert status == 0, text
    else:  # what does not depend on time
        assert "without CP code" not in text.rpartition("\n\n")[2], text
        assert "syncs with 4 layers" not in text, text
        assert "differ" not in text.rpartition("\n\n")[2], text


def test_counts_by_name():
    """Launches of both CUDA interfaces, copies and waits; on a CPU work without views."""
    calls = {
        "cudaLaunchKernel": 3,
        "cuLaunchKernelEx": 2,
        "aten::copy_": 4,
        "cudaStreamSynchronize": 5,
        "cudaDeviceSynchronize": 1,
        "aten::mm": 6,
        "aten::view": 7,
    }
    assert runs.count_calls(calls, on_gpu=True) == runs.Counts(launches=5, copies=4, syncs=5)
    assert runs.count_calls(calls, on_gpu=False) == runs.Counts(launches=10, copies=4, syncs=0)


def test_saved_memory_counts_each_storage_once():
    """Two views of one tensor are one tensor; a parameter does not count."""
    weight = torch.ones(256, requires_grad=True)
    kept = {}

    def forward():
        x = weight * 2.0
        kept["y"] = (x[:128] * x[128:]).exp()

    # x once, the product's result not at all, exp's result
    assert runs.saved_gib(forward) * 2**30 == 256 * 4 + 128 * 4


def test_model_flops():
    """6 per token and active parameter but the lookup, and causal attention over each document."""
    case = model_slice.Case(tiny=False, host=False, experts=256, optimizer=False)
    assert sum(case.lengths) == 32_768
    # by hand: GDN, attention, router and 9 experts of 3 x 2048 x 512, output layer
    gdn = 2048 * (8192 + 4096 + 64) + 4096 * 2048
    attention = 2048 * (8192 + 1024) + 4096 * 2048
    moe = 2048 * 256 + 9 * 3 * 2048 * 512
    want = 6 * 32_768 * (6 * gdn + 2 * attention + 8 * moe + 248_320 * 2048)
    want += 6 * 2 * 8 * 4096**2 * 4096
    assert model_slice.model_flops(case) == pytest.approx(want, rel=1e-3)


def test_line_through_shares():
    """What falls as 1/CP and a constant is on the line; what does not fall is not."""
    assert memory_share.worst_ratio([8.5, 4.5, 2.5, 1.5]) == pytest.approx(1)
    assert memory_share.line([8.5, 4.5, 2.5, 1.5]) == pytest.approx((8, 0.5))
    assert memory_share.worst_ratio([8.0, 8.0, 8.0, 1.0]) > memory_share.SLACK


def test_runner_ends_what_takes_too_long():
    """Statuses come back, time runs out, caches are in the folder."""
    environ = run_gpu.environment("cache")
    assert environ["TRITON_CACHE_DIR"] == os.path.abspath("cache/triton")
    assert run_gpu.run([sys.executable, "-c", "raise SystemExit(3)"], 30, environ) == 3
    assert run_gpu.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5, environ) is None


def test_warming_tells_of_failures(monkeypatch, capfd):
    """Each process is waited for; one that fails or takes too long is named."""
    monkeypatch.setattr(warm_kernels, "jobs", lambda: {"heads / none": {}})
    assert warm_kernels.main() == 1
    assert "heads / none: 1" in capfd.readouterr().out
    monkeypatch.setattr(warm_kernels, "SECONDS", 0)
    assert warm_kernels.main() == 1
    assert "heads / none: out of time" in capfd.readouterr().out
