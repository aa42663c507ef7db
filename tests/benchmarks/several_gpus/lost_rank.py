"""One rank is lost in the middle of a backward pass: how long the others take to end, and what they say."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.several_gpus.cases import SLICE, Scale, Work
from tests.benchmarks.several_gpus.launch import Launcher
from tests.benchmarks.several_gpus.layers import make_step
from tests.helpers.distributed import make_groups
from tests.helpers.lost_rank import LOSSES, Ending, lose_rank

STEPS = 20
"""Of the ranks that are not lost, at most: many more than they come to."""
AFTER_TIME_OUT = 90.0
"""Seconds in which a rank must have ended after a collective's time-out: NCCL's watchdog waits and writes."""
CAUSES = re.compile(
    r"timed? ?out|connection (closed|reset)|remote process|peer|ncclRemoteError|broken pipe", re.IGNORECASE
)
"""What a user can take for "another rank is gone"."""


def train(
    rank: int, world_size: int, lose: Callable[[], None], size: str, tokens: int, timeout: float
) -> None:
    """Steps of 4 layers with chunkwise CP; `lose` is called in the second step, between two layers."""
    with make_groups(cp=world_size, distributed_timeout_minutes=timeout / 60) as groups:
        step = make_step(Work(SLICE, "chunkwise"), size, groups, tokens, recompute=False)
        step()

        def lose_in_backward(_layer, _given, output) -> None:
            output[0].register_hook(lambda _: lose())  # what a hook returns would take the output's place

        step.module.layers[2].register_forward_hook(lose_in_backward)
        for _ in range(STEPS):
            step()


def endings(launcher: Launcher, scale: Scale, gpus: int) -> dict[str, list[Ending]]:
    """How the others end after each kind of loss.

    Args:
        launcher: backend and start of ranks.
        scale: size of the layers, of which the shortest stream is used, and the collectives' time-out.
        gpus: ranks.
    """
    found, timeout = {}, scale.time_out
    for how in LOSSES:
        with tempfile.TemporaryDirectory(prefix="lost-") as folder:
            found[how] = lose_rank(
                train,
                gpus,
                Path(folder),
                *(scale.size, scale.tokens[0], timeout),
                how=how,
                timeout=timeout,
                grace=timeout + AFTER_TIME_OUT + 60,
                start=launcher.start,
                backend=launcher.backend,
            )
    return found


def cause(ending: Ending) -> str:
    """The last line that names why the rank ended; empty if none does."""
    lines = [line.strip() for line in ending.said.splitlines() if CAUSES.search(line)]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return errors[-1] if errors else ""


def summary(ending: Ending) -> dict[str, object]:
    """What the report keeps: rank, seconds, exit_code, cause (shortened)."""
    return {
        "rank": ending.rank,
        "seconds": ending.seconds,
        "exit_code": ending.exit_code,
        "cause": _UNLIKE.sub("N", cause(ending))[:160].replace("|", "/"),
    }


_UNLIKE = re.compile(r"\d+(\.\d+)*(:\d+)?")
"""Numbers, in which ranks' messages differ."""


def fault(ending: Ending, timeout: float) -> str:
    """What is wrong with an ending; empty if a user is well served by it."""
    if ending.seconds is None:
        return "never ended"
    if ending.seconds > timeout + AFTER_TIME_OUT:
        return f"ended {ending.seconds:.0f} s after the loss, with a time-out of {timeout:.0f} s"
    if not ending.exit_code:
        return "ended as if nothing had happened"
    return "" if cause(ending) else "did not say why it ended"
