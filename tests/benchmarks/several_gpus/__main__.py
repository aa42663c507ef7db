"""Are several GPUs right, and how fast?

python -m tests.benchmarks.several_gpus              all parts on 1, 2, 4, ... GPUs, as many as there are
python -m tests.benchmarks.several_gpus --parts parity scaling --gpus 8         some parts, on 8 GPUs only
python -m tests.benchmarks.several_gpus --cpu 2      all parts, tiny, 2 ranks on gloo: does the script work?

Run from the root of the repository. Writes several_gpus.md and several_gpus.json (what was measured so far)
to results/, with --cpu to --out or nowhere, after every part; a later run adds to them. Without a GPU it
writes the predictions beside columns that say "not run".

Exit status 1 if a check fails, or if a rank outlives a lost one too long or does not say why it ended.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import _dynamo

from megatron_gdn import cpu
from tests.benchmarks.report import RESULTS, provenance
from tests.benchmarks.several_gpus import longest, lost_rank, parity, scaling
from tests.benchmarks.several_gpus.cases import (
    CPU_SCALE,
    GPU_SCALE,
    MOST_GPUS,
    PARTS,
    Scale,
    gpu_counts,
    scaling_cases,
)
from tests.benchmarks.several_gpus.launch import CPU, GPU, Launcher
from tests.benchmarks.several_gpus.report import Figures, render

Bad = list[str]


def run_parity(launcher: Launcher, scale: Scale, gpus: int) -> tuple[dict[str, str], Bad]:
    """Result of every check."""
    found = parity.run_checks(launcher, gpus, *parity.arguments(launcher))
    return found, [f"{name}: {result}" for name, result in found.items() if result != "pass"]


def run_scaling(launcher: Launcher, scale: Scale, gpus: int) -> tuple[dict[str, dict], Bad]:
    """Figures of every case."""
    with tempfile.TemporaryDirectory(prefix="several-") as folder:
        cases = list(scaling_cases(scale, gpus))
        found = scaling.measure_all(launcher, scale, cases, Path(folder))
    return {case.key: figures for case, figures in found.items()}, []


def run_longest(launcher: Launcher, scale: Scale, gpus: int) -> tuple[dict[str, tuple], Bad]:
    """What fits, with and without recomputation."""
    with tempfile.TemporaryDirectory(prefix="several-") as folder:
        return {
            name: longest.search(launcher, scale, gpus, recompute, Path(folder))
            for name, recompute in (("kept", False), ("recomputed", True))
        }, []


def run_lost_rank(launcher: Launcher, scale: Scale, gpus: int) -> tuple[dict[str, list], Bad]:
    """How the others end."""
    found, bad = {}, []
    for how, endings in lost_rank.endings(launcher, scale, gpus).items():
        found[how] = [lost_rank.summary(ending) for ending in endings]
        for ending in endings:
            if fault := lost_rank.fault(ending, scale.time_out):
                bad.append(f"{gpus} ranks, one {how}: rank {ending.rank} {fault}\n{ending.said[-2000:]}")
    return found, bad


RUN: dict[str, Callable[[Launcher, Scale, int], tuple[Any, Bad]]] = {
    "parity": run_parity,
    "scaling": run_scaling,
    "longest": run_longest,
    "lost_rank": run_lost_rank,
}


def origin(launcher: Launcher) -> str:
    """Where and with what figures are made."""
    device = torch.cuda.get_device_name() if launcher is GPU else "CPU"
    lines = provenance("python -m tests.benchmarks.several_gpus")
    return "; ".join([device, launcher.backend, *(line.removeprefix("- ") for line in lines)])


def main(arguments: list[str]) -> int:
    """Run what was asked for; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.several_gpus")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--gpus", nargs="+", type=int, help="numbers of GPUs (default: 1, 2, 4, ...)")
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="tiny sizes on gloo, at most so many ranks")
    parser.add_argument("--out", type=Path, help="folder of the two files")
    args = parser.parse_args(arguments)

    launcher, scale = (CPU, CPU_SCALE) if args.cpu else (GPU, GPU_SCALE)
    there = args.cpu or torch.cuda.device_count()
    counts = args.gpus or (gpu_counts(there) if there else [])
    if wrong := [n for n in counts if n not in gpu_counts(there or 1) or n > there]:
        parser.error(f"--gpus {wrong}: this machine has {there}; say powers of two that it has.")
    if args.cpu:
        cpu.enable()
    # to compile on a CPU takes longer than all that is run there
    with (
        tempfile.TemporaryDirectory(prefix="several-") as nowhere,
        _dynamo.config.patch(disable=bool(args.cpu)),
    ):
        folder = args.out or (Path(nowhere) if args.cpu else RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        figures, bad = Figures(folder / "several_gpus.json"), []
        most = args.cpu or max(there, MOST_GPUS)
        names = {n: list(parity.checks(n, *parity.arguments(launcher))) for n in gpu_counts(most)}
        report = render(figures, scale, most, names)
        for gpus in counts:
            for part in (p for p in args.parts if gpus > 1 or p != "lost_rank"):
                print(f"{part}, {gpus} ranks", flush=True)
                found, faults = RUN[part](launcher, scale, gpus)
                figures.add(part, gpus, origin(launcher), found)
                bad += faults
                report = render(figures, scale, most, names)
                (folder / "several_gpus.md").write_text(report)
        (folder / "several_gpus.md").write_text(report)
    print(report)
    print("\n".join(bad) or "no fault found")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
