"""The log, its curve and what the host is watched for."""

from types import SimpleNamespace

import pytest
import torch

from megatron_gdn import training_log
from megatron_gdn.training_log import CURVE_NAME, LOG_NAME, TrainingLog, curve, read_log


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Seconds that the log reads; change the first element to let time pass."""
    now = [0.0]
    monkeypatch.setattr(training_log.time, "perf_counter", lambda: now[0])
    return now


def test_step_gives_speed_and_time_left(tmp_path, clock):
    """Speed leaves out pauses, and time left follows from the last steps."""
    log = TrainingLog(str(tmp_path / "run"), tokens_per_sample=100, total_iterations=10)
    log.start(iteration=2, samples=8)
    clock[0] = 5.0
    log.pause(3.0)
    line = log.step(iteration=4, samples=16, loss=2.5, grad_norm=1.0, learning_rate=0.1)
    assert line == " step 4 of 10 | loss 2.5000 | 400 tokens/s | 0:00:06 left"
    (record,) = read_log(tmp_path / "run" / LOG_NAME)
    assert record == {
        "iteration": 4,
        "lm loss": 2.5,
        "grad norm": 1.0,
        "learning rate": 0.1,
        "tokens per second": 400.0,
        "consumed tokens": 1600,
    }


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    """No folder, no files, and no folder before there is something to say."""
    monkeypatch.chdir(tmp_path)
    log = TrainingLog(None, 1, 2)
    log.step(1, 1, 3.0, None, None)
    assert log.finish() is None
    assert TrainingLog("run", 1, 2).finish() is None
    assert not list(tmp_path.iterdir())


def test_finish_draws_the_curve(tmp_path):
    """A PNG stands beside the log."""
    log = TrainingLog(str(tmp_path), 1, 2)
    log.step(1, 1, 3.0, 1.0, 0.1)
    log.step(2, 2, 2.0, 1.0, 0.1)
    log.evaluation("validation", 2, 2, 2.5)
    assert log.finish() == str(tmp_path / CURVE_NAME)
    assert (tmp_path / CURVE_NAME).read_bytes().startswith(b"\x89PNG")


def test_curve_takes_the_last_word_of_a_resumed_run():
    """Iteration 2 was run twice; evaluations are no training losses."""
    records = [
        {"iteration": 2, "lm loss": 5.0},
        {"iteration": 1, "lm loss": 6.0},
        {"iteration": 2, "lm loss": 4.0},
        {"iteration": 2, "validation loss": 4.5},
    ]
    assert curve(records, "lm loss") == {1: 6.0, 2: 4.0}
    assert curve(records, "validation loss") == {2: 4.5}


def make_host() -> SimpleNamespace:
    """A stand-in for the host's training module, with the parameters of its functions."""
    host = SimpleNamespace()

    def run_training_log(
        loss_dict,
        total_loss_dict,
        learning_rate,
        iteration,
        loss_scale,
        report_memory_flag,
        skipped_iter,
        grad_norm,
    ):
        return "flag"

    def run_evaluate(*inputs):
        return {"lm loss": torch.tensor(4.0)}, None, False

    def run_evaluate_and_print_results(prefix, forward, data, model, iteration):
        host.evaluate(forward, data, model)

    host.training_log = run_training_log
    host.evaluate = run_evaluate
    host.evaluate_and_print_results = run_evaluate_and_print_results
    host.save_checkpoint_and_time = lambda: None
    host.train = lambda: "done"
    return host


def test_watch_logs_what_the_host_does(tmp_path, capsys):
    """The mean loss of the steps since the last line, without skipped ones, and both evaluations."""
    host = make_host()
    args = SimpleNamespace(train_iters=4, iteration=0, consumed_train_samples=0, log_interval=2)
    log = TrainingLog(str(tmp_path), tokens_per_sample=10)
    log.watch(host, args)
    assert host.train() == "done"
    for iteration, (loss, skipped) in enumerate([(6.0, 0), (9.0, 1), (5.0, 0), (3.0, 0)], 1):
        args.consumed_train_samples += 2
        assert (
            host.training_log({"lm loss": torch.tensor(loss)}, {}, 0.1, iteration, 1.0, True, skipped, 2.0)
            == "flag"
        )
    host.evaluate_and_print_results("iteration 4 on validation set", None, None, None, 4)
    host.evaluate_and_print_results("iteration 4 on test set", None, None, None, 4)
    records = read_log(tmp_path / LOG_NAME)
    assert [r.get("lm loss") for r in records] == [6.0, 4.0, None, None]
    assert records[1]["consumed tokens"] == 80 and records[1]["grad norm"] == 2.0
    assert records[2]["validation loss"] == records[3]["test loss"] == 4.0
    assert capsys.readouterr().out.count(" left\n") == 2
