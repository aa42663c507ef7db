"""The parts of the several-GPU benchmark that need no ranks: searches, predictions, the report."""

import json

import pytest

from tests.benchmarks.report import RESULTS
from tests.benchmarks.several_gpus import longest, lost_rank, parity, report, scaling
from tests.benchmarks.several_gpus.cases import (
    CPU_SCALE,
    GDN,
    GPU_SCALE,
    HOST,
    MOST_GPUS,
    WORKS,
    Case,
    Work,
    gpu_counts,
    scaling_cases,
)
from tests.benchmarks.several_gpus.launch import CPU, GPU, OutOfMemory
from tests.benchmarks.several_gpus.predict import USABLE, Shape, longest_stream, predict
from tests.helpers.lost_rank import Ending

SHAPE = Shape.of(GPU_SCALE.size)


class Memory:
    """Stands for a launcher: runs tries on one rank that has room for so many tokens."""

    def __init__(self, room):
        self.room, self.tries = room, []

    def run(self, fn, gpus, scale, known, recompute, deadline, log):
        while (trial := longest.next_try(known, scale)) is not None:
            self.tries.append(trial)
            if trial > self.room:
                raise OutOfMemory
            known = longest.Range(trial, known.too_long)
            with log.open("a") as file:
                file.write(f"{trial}\n")


@pytest.mark.parametrize("room", (0, 5_000, 40_000, 100_001, 2**21 + 1, 2**30))
def test_search_ends_within_an_eighth(room, tmp_path):
    """What fits was tried and fits, what is too long is too long, and they are close."""
    memory = Memory(room)
    fits, too_long = longest.search(memory, GPU_SCALE, 2, True, tmp_path)
    grain = GPU_SCALE.search_start // 8
    assert fits <= room and fits in (0, *memory.tries)
    assert all(trial % grain == 0 for trial in memory.tries)
    assert len(set(memory.tries)) == len(memory.tries) < 20
    if room >= GPU_SCALE.search_limit:
        assert (fits, too_long) == (GPU_SCALE.search_limit, None)
    else:
        assert room < too_long <= fits + max(fits // 8, grain)


def test_scaling_goes_on_after_a_case_that_does_not_fit(tmp_path):
    """It and longer streams of the same work have no figures; all others are measured."""
    cases = list(scaling_cases(GPU_SCALE, 4))
    large = Work(GDN, HOST)

    class Launcher:
        def run(self, fn, gpus, scale, left, log):
            for case in left:
                if case.work == large and case.tokens > 2**15:
                    raise OutOfMemory
                with log.open("a") as file:
                    file.write(json.dumps({"seconds": case.tokens}) + "\n")

    found = scaling.measure_all(Launcher(), GPU_SCALE, cases, tmp_path)
    assert set(found) == set(cases)
    for case in cases:
        lost = case.work == large and case.tokens > 2**15
        assert found[case] == ({} if lost else {"seconds": case.tokens})


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_more_gpus_are_predicted_faster(work):
    """But never in proportion; and nothing is sent by one."""
    for tokens in GPU_SCALE.tokens:
        lines = [predict(Case(work, tokens, gpus), SHAPE) for gpus in gpu_counts(MOST_GPUS)]
        assert lines[0].communication == lines[0].sent_bytes == 0
        for n, line in zip(gpu_counts(MOST_GPUS)[1:], lines[1:], strict=True):
            assert lines[0].seconds / n < line.seconds < lines[0].seconds
            assert 0 < line.communication < line.seconds
            assert line.peak_bytes < lines[0].peak_bytes


def test_longest_stream_fills_the_memory():
    """The predicted length needs what a GPU has, as the table of strong scaling counts it."""
    for gpus in gpu_counts(MOST_GPUS):
        tokens = longest_stream(gpus, True, SHAPE) // gpus * gpus
        peak = predict(Case(Work("4 layers", "headwise"), tokens, gpus), SHAPE).peak_bytes
        assert peak == pytest.approx(USABLE, rel=1e-3)
        assert longest_stream(gpus, False, SHAPE) < tokens / 2


def names(launcher, most):
    return {n: list(parity.checks(n, *parity.arguments(launcher))) for n in gpu_counts(most)}


def test_report_without_figures(tmp_path):
    """Every measured cell says so; every predicted one has a number."""
    text = report.render(report.Figures(tmp_path / "none.json"), GPU_SCALE, 8, names(GPU, 8))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    scaling_rows = [row for row in rows if len(row) == 12 and row[0] != "| what"]
    assert len(scaling_rows) == len(WORKS) * len(GPU_SCALE.tokens) * 4
    for row in scaling_rows:
        assert [cell.strip(" |") for cell in row[3::2]] == [report.NOT_RUN] * 5
        assert all(cell == report.TOO_LONG or float(cell.replace(",", "")) >= 0 for cell in row[2::2])
    assert all("not run" in " ".join(row) for row in rows if row[0].startswith("| MoE model"))


def test_report_keeps_what_other_runs_found(tmp_path):
    """Figures of other parts and numbers of GPUs stay; those of the same are replaced."""
    file = tmp_path / "figures.json"
    for gpus, fits in ((2, 1000), (4, 2000), (2, 3000)):
        found = {"kept": [fits, None], "recomputed": [2 * fits, 5 * fits]}
        report.Figures(file).add("longest", gpus, f"run {fits}", found)
    case = next(scaling_cases(CPU_SCALE, 2))
    figures = {"seconds": 0.5, "without_communication": 0.25, "sent_bytes": 2**21, "peak_bytes": 2**31}
    report.Figures(file).add("scaling", 2, "a machine", {case.key: figures})
    text = report.render(report.Figures(file), CPU_SCALE, 4, names(CPU, 4))
    assert "| 6,000 | none tried |" in text and "| 12,000 | 30,000 |" in text and "| 8,000 |" in text
    assert "run 1000" not in text and "run 3000" in text and "a machine" in text
    measured = next(line for line in text.splitlines() if line.startswith(f"| {case.work} | 2 |"))
    cells = measured.strip("| ").split(" | ")[3::2]
    assert cells == ["500.0", f"{case.tokens / 0.5 / 2:,.0f}", "250.0", "2.0", "2.0"]


def test_results_are_what_the_command_writes():
    """The report in results/ has the predictions and figures as they are."""
    figures = report.Figures(RESULTS / "several_gpus.json")
    text = report.render(figures, GPU_SCALE, MOST_GPUS, names(GPU, MOST_GPUS))
    assert (RESULTS / "several_gpus.md").read_text() == text


@pytest.mark.parametrize(
    ("ending", "fault"),
    [
        (Ending(0, 2.0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:3"), ""),
        (Ending(0, 2.0, -6, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), ""),
        (Ending(0, None, None, "RuntimeError: Connection closed by peer"), "never ended"),
        (Ending(0, 99.0, 1, "RuntimeError: Timed out waiting 3000ms"), "ended 99 s after the loss"),
        (Ending(0, 2.0, 0, "connection reset"), "as if nothing had happened"),
        (Ending(0, 2.0, -11, "loss 3.2"), "did not say why"),
    ],
)
def test_lost_rank_faults(ending, fault):
    """An ending is good that comes in time, with a failing exit status and a cause."""
    found = lost_rank.fault(ending, timeout=3.0)
    assert fault in found and bool(fault) == bool(found)
