"""The several-GPU benchmark as a whole, at tiny sizes on gloo; and what becomes of ranks that lose one."""

import json
import time

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks.several_gpus import lost_rank
from tests.benchmarks.several_gpus.__main__ import main
from tests.benchmarks.several_gpus.cases import CPU_SCALE, HOST, SLICE, scaling_cases
from tests.benchmarks.several_gpus.predict import Shape, predict
from tests.helpers.lost_rank import LOSSES, lose_rank


def test_every_part_runs_on_two_ranks(tmp_path, capsys):
    """No check fails, every figure is there, and each rank sent what was predicted."""
    status = main(["--cpu", "2", "--gpus", "2", "--out", str(tmp_path)])
    printed, text = capsys.readouterr().out, (tmp_path / "several_gpus.md").read_text()
    assert status == 0, printed
    assert text in printed and "no fault found" in printed
    found = {
        part: counts["2"]["found"]
        for part, counts in json.loads((tmp_path / "several_gpus.json").read_text()).items()
    }
    assert set(found["parity"].values()) == {"pass"}
    for line in text.splitlines():
        assert not (line.startswith("| ") and "CP 2" in line and "not run" in line)

    shape = Shape.of(CPU_SCALE.size)
    cases = list(scaling_cases(CPU_SCALE, 2))
    assert set(found["scaling"]) == {case.key for case in cases}
    for case in cases:
        figures, predicted = found["scaling"][case.key], predict(case, shape)
        assert figures["seconds"] > 0 and figures["without_communication"] > 0
        within = 0.1 if case.work.module == SLICE or case.work.way == HOST else 0.0
        assert figures["sent_bytes"] == pytest.approx(predicted.sent_bytes, rel=within), case.key

    limit = [CPU_SCALE.search_limit, None]
    assert found["longest"] == {"kept": limit, "recomputed": limit}
    assert set(found["lost_rank"]) == set(LOSSES)
    assert all(ending["cause"] for endings in found["lost_rank"].values() for ending in endings)


def test_scaling_runs_on_one_rank(tmp_path):
    """A group of one, as on a machine with one GPU; a rank cannot be lost from it."""
    assert main(["--cpu", "1", "--parts", "scaling", "lost_rank", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "several_gpus.json").read_text())
    assert set(found) == {"scaling"}
    assert all(figures["sent_bytes"] == 0 for figures in found["scaling"]["1"]["found"].values())


def add_up(rank, world_size, lose, at):
    """Ten all-reduces; before the one numbered `at`, the last rank is lost."""
    for number in range(10):
        if number == at:
            lose()
        dist.all_reduce(torch.ones(8))


@pytest.mark.parametrize("how", LOSSES)
def test_ranks_end_when_one_is_lost(how, tmp_path):
    """All others end inside the time-out, with an error that names the cause."""
    timeout = 2.0
    start = time.monotonic()
    endings = lose_rank(add_up, 3, tmp_path, 4, how=how, timeout=timeout, grace=20.0)
    assert [ending.rank for ending in endings] == [0, 1]
    for ending in endings:
        assert lost_rank.fault(ending, timeout) == "", ending.said
        assert ending.seconds < timeout + 8.0
    assert time.monotonic() - start < 20.0


def go_on(rank, world_size, lose):
    """No rank waits for another, so that none learns of the loss."""
    lose()
    time.sleep(60)


def test_a_rank_that_never_ends_is_told_and_ended(tmp_path):
    """The harness itself: what does not end is said to, and no process is left."""
    (ending,) = lose_rank(go_on, 2, tmp_path, how="killed", timeout=2.0, grace=1.0)
    assert ending.seconds is None
    assert lost_rank.fault(ending, 2.0) == "never ended"


def test_no_loss_is_an_error(tmp_path):
    """A run in which no rank was lost proves nothing."""
    with pytest.raises(AssertionError, match="ended before one was lost"):
        lose_rank(add_up, 2, tmp_path, 99, how="killed", timeout=20.0, grace=1.0)
