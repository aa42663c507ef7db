"""What a person sees of a run: a progress line, a JSON-lines log and a picture of the loss.

Imports nothing of the host: the training script hands over the module to watch.
"""

import functools
import inspect
import json
import logging
import os
import time
from argparse import Namespace
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType

import torch
from torch import Tensor

LOG_NAME = "training_log.jsonl"
CURVE_NAME = "loss_curve.png"


@dataclass
class TrainingLog:
    """Writes to a folder as training goes on; one rank holds one."""

    folder: str | None
    """Where the log and the picture go; None writes neither."""
    tokens_per_sample: int
    total_iterations: int = 0
    _last_time: float = field(default_factory=time.perf_counter)
    _last_samples: int = 0
    _last_iteration: int = 0
    _paused: float = 0.0
    """Seconds spent on other things than training since the last step that was logged."""

    def watch(self, training: ModuleType, args: Namespace) -> None:
        """Have the host tell this log what happens.

        The host offers no hook, so its functions are wrapped where its training loop looks them up. The
        loss is read only when the host prints, so no step waits for the device on our account.

        Args:
            training: the module `megatron.training.training`.
            args: the host's arguments, which it also keeps its counters in.
        """
        signature = inspect.signature(training.training_log)
        losses: list[Tensor] = []
        evaluated: list[dict] = []

        def train(original, *inputs, **options):
            self.total_iterations = args.train_iters
            self.start(args.iteration, args.consumed_train_samples)
            return original(*inputs, **options)

        def training_log(original, *inputs, **options):
            answer = original(*inputs, **options)
            seen = signature.bind(*inputs, **options).arguments
            if not seen["skipped_iter"]:
                losses.append(seen["loss_dict"]["lm loss"].detach().view(()))
            iteration = seen["iteration"]
            if losses and (iteration % args.log_interval == 0 or iteration == args.train_iters):
                loss = torch.stack(losses).mean().item()
                losses.clear()
                norm, rate = seen["grad_norm"], seen["learning_rate"]
                norm = None if norm is None else float(norm)
                print(self.step(iteration, args.consumed_train_samples, loss, norm, rate), flush=True)
            return answer

        def evaluate(original, *inputs, **options):
            answer = original(*inputs, **options)
            evaluated.append(answer[0] or {})
            return answer

        def evaluate_and_print_results(original, prefix, forward, data, model, iteration, *inputs, **options):
            start = time.perf_counter()
            original(prefix, forward, data, model, iteration, *inputs, **options)
            self.pause(time.perf_counter() - start)
            kind = "test" if "test set" in prefix else "validation"
            for values in evaluated:
                if "lm loss" in values:
                    self.evaluation(kind, iteration, args.consumed_train_samples, float(values["lm loss"]))
            evaluated.clear()

        def save_checkpoint_and_time(original, *inputs, **options):
            start = time.perf_counter()
            original(*inputs, **options)
            self.pause(time.perf_counter() - start)

        wrappers = (train, training_log, evaluate, evaluate_and_print_results, save_checkpoint_and_time)
        for wrapper in wrappers:
            original = getattr(training, wrapper.__name__)
            setattr(training, wrapper.__name__, functools.partial(wrapper, original))

    def start(self, iteration: int, samples: int) -> None:
        """Begin to measure speed: `iteration` steps and `samples` samples are done."""
        self._last_time, self._paused = time.perf_counter(), 0.0
        self._last_iteration, self._last_samples = iteration, samples

    def pause(self, seconds: float) -> None:
        """Leave `seconds` of evaluating or saving out of the training speed."""
        self._paused += seconds

    def step(
        self, iteration: int, samples: int, loss: float, grad_norm: float | None, learning_rate: float | None
    ) -> str:
        """Log the steps since the last call.

        Args:
            iteration: steps done.
            samples: samples consumed since training began.
            loss: mean over those steps, nats per token.
            grad_norm: of the last step.
            learning_rate: of the last step.

        Returns:
            A line for a person: loss, tokens/s and time left.
        """
        seconds = max(time.perf_counter() - self._last_time - self._paused, 1e-9)
        speed = (samples - self._last_samples) * self.tokens_per_sample / seconds
        left = seconds / max(iteration - self._last_iteration, 1) * (self.total_iterations - iteration)
        self.start(iteration, samples)
        self._write(
            {
                "iteration": iteration,
                "lm loss": loss,
                "grad norm": grad_norm,
                "learning rate": learning_rate,
                "tokens per second": speed,
                "consumed tokens": samples * self.tokens_per_sample,
            }
        )
        return (
            f" step {iteration} of {self.total_iterations} | loss {loss:.4f} | {speed:,.0f} tokens/s | "
            f"{timedelta(seconds=round(left))} left"
        )

    def evaluation(self, kind: str, iteration: int, samples: int, loss: float) -> None:
        """Log a loss on held-out text; `kind` is "validation" or "test"."""
        self._write(
            {
                "iteration": iteration,
                f"{kind} loss": loss,
                "consumed tokens": samples * self.tokens_per_sample,
            }
        )

    def finish(self) -> str | None:
        """Draw the loss curve beside the log; its path, or None if nothing was logged."""
        if self.folder is None or not os.path.exists(os.path.join(self.folder, LOG_NAME)):
            return None
        records = read_log(os.path.join(self.folder, LOG_NAME))
        path = os.path.join(self.folder, CURVE_NAME)
        draw_curves(
            {"training": curve(records, "lm loss"), "held-out": curve(records, "validation loss")}, path
        )
        return path

    def _write(self, record: dict) -> None:
        if self.folder is None:
            return
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, LOG_NAME), "a") as log:
            log.write(json.dumps(record) + "\n")


def read_log(path: str) -> list[dict]:
    """The records of a log, oldest first."""
    with open(path) as log:
        return [json.loads(line) for line in log]


def curve(records: list[dict], name: str) -> dict[int, float]:
    """Iteration -> value of `name`; a run that was resumed counts with its last word on an iteration."""
    return dict(sorted({r["iteration"]: r[name] for r in records if r.get(name) is not None}.items()))


def draw_curves(curves: dict[str, dict[int, float]], path: str) -> None:
    """Draw labelled curves of loss over iterations into a PNG."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (label, points) in enumerate(curves.items()):
        if points:
            style = {"linestyle": "--" if number else "-", "linewidth": 1.5 if number else 3}
            style["marker"] = "." if len(points) < 30 else None  # curves that agree lie on each other
            axes.plot(list(points), list(points.values()), label=label, **style)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
