"""Strong scaling: time, exposed communication and peak memory of one training step.

The time without communication is that of the same step with every collective replaced by copies inside
this rank, from and into buffers of the same sizes. What the step then computes is not the layer's result,
but it is the same work. The difference to the real step is the communication that computation does not
hide, waiting for slower ranks included.
"""

import functools
import inspect
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.several_gpus.cases import Case, Scale
from tests.benchmarks.several_gpus.launch import Launcher, OutOfMemory
from tests.benchmarks.several_gpus.layers import Step, free, make_step
from tests.helpers.collectives import count_collectives, named, replaced
from tests.helpers.distributed import make_groups

MOST_REPEATS = 10

Figures = dict[str, float]
"""seconds, without_communication (seconds), sent_bytes (this step, most of any rank), peak_bytes."""


def measure_all(launcher: Launcher, scale: Scale, cases: Sequence[Case], folder: Path) -> dict[Case, Figures]:
    """Figures of every case of one number of GPUs; none where memory did not suffice.

    A rank that runs out of memory leaves the others waiting, so that all are ended and new ones take the
    next case. A work that does not fit is not tried with more tokens.
    """
    found: dict[Case, Figures] = {}
    left, log = list(cases), folder / "figures.jsonl"
    while left:
        log.write_text("")
        try:
            launcher.run(_measure_rank, left[0].gpus, scale, left, log)
            done = True
        except OutOfMemory:
            done = False
        lines = log.read_text().splitlines()
        found |= {case: json.loads(line) for case, line in zip(left, lines, strict=False)}
        if done:
            break
        lost = left[len(lines)]
        found |= {case: {} for case in left if case.work == lost.work and case.tokens >= lost.tokens}
        left = [case for case in left if case not in found]
    return found


def _measure_rank(rank: int, world_size: int, scale: Scale, cases: Sequence[Case], log: Path) -> None:
    """Body of one rank: a line in `log` for every case."""
    with make_groups(cp=world_size) as groups:
        for case in cases:
            free()
            step = make_step(case.work, scale.size, groups, case.tokens)
            figures = measure(step, scale.step_seconds)
            del step
            if rank == 0:
                with log.open("a") as file:
                    file.write(json.dumps(figures) + "\n")


def measure(step: Step, seconds: float) -> Figures:
    """Medians over repeats of the slowest rank's time; every rank must call it, and gets the same.

    Args:
        step: what is timed.
        seconds: to spend on repeats; there are 1 to `MOST_REPEATS`.
    """
    with count_collectives() as sent:
        step()  # compiles and tunes kernels, and meets the largest demand for memory
    (once,) = largest(timed(step))
    repeats = min(max(int(seconds / once), 1), MOST_REPEATS)
    real = largest(*(timed(step) for _ in range(repeats)))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    with replaced(silent):
        step()
        alone = [timed(step) for _ in range(repeats)]
    sent_bytes, peak = largest(sent.sent_bytes(), peak)
    return {
        "seconds": statistics.median(real),
        "without_communication": statistics.median(largest(*alone)),
        "sent_bytes": sent_bytes,
        "peak_bytes": peak,
    }


def timed(step: Step) -> float:
    """Seconds of one step on this rank, started by all ranks together."""
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def largest(*values: float) -> list[float]:
    """Of every value, the largest of all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    all_ranks = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(all_ranks, op=dist.ReduceOp.MAX)
    return all_ranks.tolist()


def silent(name: str, function: Callable) -> Callable:
    """A stand-in for a collective that copies inside this rank what it would exchange.

    Args:
        name: of the function in `torch.distributed`.
        function: that function.
    """
    signature = inspect.signature(function)

    def stand_in(*args, **kwargs) -> "_Done | None":
        given = named(signature, args, kwargs)
        if name not in _COPIES:
            raise NotImplementedError(f"{name} has no silent stand-in")
        _COPIES[name](given)
        return _Done() if given.get("async_op") else None

    return functools.wraps(function)(stand_in)


class _Done:
    """Stands for a `torch.distributed.Work` that is over."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def _copy(target: Tensor, source: Tensor) -> None:
    """As much of `source` as there is room for, over and over if there is more room."""
    target, source = target.view(-1), source.reshape(-1)
    if not source.numel():
        target.zero_()
        return
    for start in range(0, target.numel(), source.numel()):
        room = target[start : start + source.numel()]
        room.copy_(source[: room.numel()])


_COPIES: dict[str, Callable[[dict], None]] = {
    "all_to_all_single": lambda given: _copy(given["output"], given["input"]),
    "all_gather_into_tensor": lambda given: _copy(given["output_tensor"], given["input_tensor"]),
    "reduce_scatter_tensor": lambda given: _copy(given["output"], given["input"]),
    "all_reduce": lambda given: None,
    "broadcast": lambda given: None,
}
