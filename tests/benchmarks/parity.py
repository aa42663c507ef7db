"""Do context-parallel runs train like the run of one rank? Trains all cases and makes the table.

    python -m tests.benchmarks.parity            from the root of the repository; writes results/parity.md
    python -m tests.benchmarks.parity --cases "bf16, packed"      only such cases; prints, writes nothing

Every run is `pretrain_qwen35.py` as a user runs it, on gloo and CPU, but with its ranks forked from this
process, which has imported everything once. All runs load one initial checkpoint, and a digest of the
weights that were loaded must be the same in all of them. Exit status 1 if a bound is missed.
"""

import argparse
import dataclasses
import itertools
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_gdn import cpu
from tests.benchmarks import training_runs
from tests.benchmarks.report import RESULTS, provenance, table
from tests.benchmarks.training_runs import (
    FLAGS,
    PACKED,
    STAY,
    check_digest,
    launch,
    lengthen_memory,
    make_data,
    save_changed,
    save_nudged,
    spec,
    start_of,
    start_switches,
)

EARLY = 10
"""Iterations in which rounding has not been amplified yet."""
ITERATIONS = {"fp32": 100, "bf16": EARLY}
SCHEDULE = {"lr-decay-iters": ITERATIONS["fp32"]}
"""The same learning rates in short runs as in long ones."""
BOUNDS = {
    "fp32": {"loss_early": 1e-5, "norm_early": 1e-4, "loss": 1e-3, "norm": 1e-3},
    "bf16": {"loss_early": 2e-3, "norm_early": 2e-3},
}
"""Largest relative difference to the run of one rank: in the first iterations, and in all."""

COINS = (1, 2, 3)
"""Of the noise floor: what one coin's rounding leaves alone, another's may tip."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    mode: str = "headwise"
    cp: int = 1
    layout: str = "zigzag"
    comm: str = "all_gather"
    packed: bool = False
    dtype: str = "fp32"
    coin: int = 0
    """Not 0: starts from weights that differ in the last bit, up or down as this coin falls."""

    @property
    def reference(self) -> "Case":
        """The run it is compared with."""
        return Case(packed=self.packed, dtype=self.dtype)

    def __str__(self) -> str:
        documents = "packed" if self.packed else "dense"
        if self.coin:
            return f"{self.dtype}, {documents}, CP 1, last bit of the weights changed, {self.coin}"
        parallel = f", {self.layout}, {self.comm}" if self.cp > 1 else ""
        return f"{self.dtype}, {documents}, CP {self.cp}, {self.mode}{parallel}"


@dataclass(frozen=True)
class Run:
    """What a run showed."""

    losses: list[float]
    norms: list[float]
    digest: str
    seconds: float


def all_cases() -> list[Case]:
    """Reference first, then the noise floor, for every dtype and kind of stream.

    The two attention modes are dealt out so that each meets every mode, layout, size and kind of stream.
    """
    cases = []
    for dtype, packed in itertools.product(ITERATIONS, (False, True)):
        one_rank = Case(packed=packed, dtype=dtype)
        cases += [one_rank, *(dataclasses.replace(one_rank, coin=coin) for coin in COINS)]
        cases.append(dataclasses.replace(one_rank, mode="chunkwise"))
        choices = itertools.product(
            *map(enumerate, (("headwise", "chunkwise"), ("zigzag", "contiguous"), (2, 4)))
        )
        for (i, mode), (j, layout), (k, cp) in choices:
            comm = ("p2p", "all_gather")[(i + j + k + packed) % 2]
            cases.append(Case(mode, cp, layout, comm, packed, dtype))
    return cases


def differences(run: Run, reference: Run) -> dict[str, float]:
    """Largest relative differences, by the names that `BOUNDS` has."""

    def largest(values: list[float], wanted: list[float]) -> float:
        found, right = (torch.tensor(x, dtype=torch.float64) for x in (values, wanted))
        return ((found - right) / right).abs().max().item()  # NaN if there is one

    return {
        "loss_early": largest(run.losses[:EARLY], reference.losses[:EARLY]),
        "loss": largest(run.losses, reference.losses),
        "norm_early": largest(run.norms[:EARLY], reference.norms[:EARLY]),
        "norm": largest(run.norms, reference.norms),
    }


def missed(case: Case, found: dict[str, float]) -> list[str]:
    """Names of the bounds that a run is not within; NaN is within none. The noise floor has no bounds."""
    if case.coin:
        return []
    return [name for name, bound in BOUNDS[case.dtype].items() if not found[name] <= bound]


def parity_table(runs: dict[Case, Run]) -> str:
    """The Markdown table of all runs but the references, which are what the others are compared with."""
    rows = []
    for case, run in runs.items():
        if case == case.reference:
            continue
        found = differences(run, runs[case.reference])
        faults = missed(case, found)
        verdict = "noise floor" if case.coin else f"FAIL ({', '.join(faults)})" if faults else "pass"
        whole = [f"{found[n]:.1e}" if len(run.losses) > EARLY else "" for n in ("loss", "norm")]
        rows.append(
            [case, f"{found['loss_early']:.1e}", whole[0], f"{found['norm_early']:.1e}", whole[1], verdict]
        )
    long = ITERATIONS["fp32"]
    head = ["case", f"loss, {EARLY} it.", f"loss, {long} it.", f"grad norm, {EARLY} it."]
    return table([*head, f"grad norm, {long} it.", ""], rows)


def save_checkpoints(prefix: str, folder: Path) -> Path:
    """One initial checkpoint for all, and beside it those of the noise floor; the first is returned."""
    flags = {"data-path": prefix, "spec": spec("headwise")}
    switches = ["--no-save-optim", "--no-save-rng"]
    launch(flags | STAY | {"save": folder / "random"}, switches, 1, folder / "save-random")
    initial = folder / "initial"
    save_changed(flags, folder / "random", initial, "fp32", lengthen_memory)
    save_nudged(flags, initial, ITERATIONS, COINS)
    return initial


def train(case: Case, prefix: str, initial: Path, folder: Path) -> Run:
    """Run one case."""
    flags = {
        "data-path": prefix,
        "load": start_of(initial, case.dtype, case.coin),
        "spec": spec(case.mode),
        "cp-layout": case.layout,
        "cp-comm-type": case.comm,
        "train-iters": ITERATIONS[case.dtype],
        **SCHEDULE,
    }
    switches = start_switches(case.dtype) + (PACKED if case.packed else [])
    records, digest, seconds = training_runs.train(flags, switches, case.cp, folder)
    losses, norms = ([record[name] for record in records] for name in ("lm loss", "grad norm"))
    return Run(losses, norms, digest, seconds)


def check_digests(runs: dict[Case, Run]) -> None:
    """Every run started from the reference's weights, and the noise floor did not."""
    for case, run in runs.items():
        check_digest(case, run.digest, runs[case.reference].digest, case.coin)


def summary(runs: dict[Case, Run], source: list[str], seconds: float) -> str:
    """What was run, from which `source`, and how the references went."""
    flags = " ".join(f"--{name} {value}" for name, value in (FLAGS | SCHEDULE).items())
    lines = [
        "# Context-parallel training against one rank",
        "",
        "Largest relative difference of the logged `lm loss` and `grad norm` to the run of one rank (CP 1, "
        "headwise) with the same dtype and documents. All runs load one checkpoint. The noise floor is runs "
        "of one rank whose initial weights differ in the last bit (of fp32, or of bf16), up or down by the "
        f"fall of coin {', '.join(map(str, COINS))}.",
        "",
        *source,
        f"- flags: `{flags}`; packed: `--dataloader-inter-document-masking --eod-mask-loss`",
        f"- bounds: fp32 {_bounds('fp32')}; bf16 {_bounds('bf16')}",
    ]
    for case, run in runs.items():
        if case == case.reference:
            lines.append(
                f"- reference {case}: loss {run.losses[0]:.4f} to {run.losses[-1]:.4f} in {len(run.losses)} "
                f"iterations, grad norm {min(run.norms):.2f} to {max(run.norms):.2f}"
            )
    lines += [f"- {len(runs)} runs in {seconds / 60:.0f} minutes", ""]
    return "\n".join(lines)


def _bounds(dtype: str) -> str:
    words = {"loss_early": f"loss, {EARLY} it.", "norm_early": f"grad norm, {EARLY} it.", "norm": "grad norm"}
    return ", ".join(f"{words.get(name, name)} {bound:.0e}" for name, bound in BOUNDS[dtype].items())


def main() -> int:
    """Make data and checkpoints, run the cases, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases with TEXT in their name")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the table is of gloo on CPUs, and CUDA does not survive a fork
    cpu.enable()
    # Once, before ranks are forked; so all runs have the same code.
    import megatron_gdn.layer_specs  # noqa: F401
    import pretrain_qwen35  # noqa: F401

    cases = [case for case in all_cases() if options.cases in str(case)]
    cases = list(dict.fromkeys(each for case in cases for each in (case.reference, case)))
    work = Path(tempfile.mkdtemp(prefix="parity-"))
    print(f"data and what the runs print: {work}", flush=True)
    start, source = time.monotonic(), provenance("python -m tests.benchmarks.parity")
    prefix = make_data(work)
    initial = save_checkpoints(prefix, work)
    runs: dict[Case, Run] = {}
    for number, case in enumerate(cases, 1):
        folder = work / str(case).replace(", ", "_").replace(" ", "-")
        runs[case] = train(case, prefix, initial, folder)
        worst = differences(runs[case], runs[case.reference])
        shown = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
        print(f"[{number}/{len(cases)}] {case}: {shown} ({runs[case].seconds:.0f} s)", flush=True)
    check_digests(runs)
    text = summary(runs, source, time.monotonic() - start) + "\n" + parity_table(runs)
    print(text)
    shutil.rmtree(work)
    if not options.cases:
        (RESULTS / "parity.md").write_text(text)
    return int(any(missed(case, differences(run, runs[case.reference])) for case, run in runs.items()))


if __name__ == "__main__":
    sys.exit(main())
