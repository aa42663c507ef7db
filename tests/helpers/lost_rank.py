"""What the other ranks do when one of them is lost: they must end, and say why, in bounded time."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.distributed import _die_with, _end, _run

LOSSES = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
"""Dead at once, or alive and silent: its connections stay open."""


class Ending(NamedTuple):
    """How a rank that was not lost ended."""

    rank: int
    seconds: float | None
    """After the loss; None: it still ran when the time was up."""
    exit_code: int | None
    said: str
    """All it wrote."""


def lose_rank(
    fn: Callable[..., Any],
    world_size: int,
    folder: Path,
    *args: Any,
    how: str,
    timeout: float,
    grace: float,
    start: str = "fork",
    backend: str = "gloo",
) -> list[Ending]:
    """Run `fn(rank, world_size, lose, *args)`; the last rank calls `lose()` somewhere in it and is lost.

    Args:
        fn: what every rank runs; a function of a module where `start` is "spawn".
        world_size: ranks, at least 2.
        folder: where the ranks meet and write; must exist and be empty.
        *args: passed on to `fn`.
        how: a key of `LOSSES`.
        timeout: seconds of every collective, of the default group; `fn` sets that of groups it makes.
        grace: seconds that the others have after the loss.
        start: as in `run_ranks`.
        backend: as in `run_ranks`.

    Returns:
        The ending of every other rank. No process is left.

    Raises:
        AssertionError: the rank was never lost, or another ended before that.
    """
    context = multiprocessing.get_context(start)
    processes = [
        context.Process(
            target=_rank_main, args=(fn, rank, world_size, args, folder, how, timeout, backend, os.getpid())
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        lost_at = _wait_for_loss(processes, folder / "lost", deadline=time.time() + timeout + grace)
        others, ended_at = processes[:-1], {}
        while len(ended_at) < len(others) and time.time() < lost_at + grace:
            running = {p.sentinel: p for p in others if p.pid not in ended_at}
            ended_at |= {running[s].pid: time.time() for s in wait(running, timeout=0.5)}
        for process in others:
            if process.pid in ended_at:
                process.join(5)  # it is gone, but its exit code may not be known yet
        return [
            Ending(
                rank,
                ended_at[process.pid] - lost_at if process.pid in ended_at else None,
                process.exitcode,
                (folder / f"rank-{rank}.txt").read_text(),
            )
            for rank, process in enumerate(others)
        ]
    finally:
        _end([p for p in processes if p.pid is not None], 0.0)


def _wait_for_loss(processes: list, mark: Path, deadline: float) -> float:
    """Time of the loss."""
    while not mark.exists():
        early = [rank for rank, process in enumerate(processes) if process.exitcode is not None]
        said = "\n".join((mark.parent / f"rank-{rank}.txt").read_text() for rank in early)
        assert not early or mark.exists(), f"ranks {early} ended before one was lost\n{said}"
        assert time.time() < deadline, "no rank was lost"
        time.sleep(0.05)
    return mark.stat().st_mtime


def _rank_main(fn, rank, world_size, args, folder, how, timeout, backend, parent) -> None:
    """Body of one process."""
    output = (folder / f"rank-{rank}.txt").open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = sys.stderr = output
    os.setsid()
    _die_with(parent)

    def lose() -> None:
        if rank == world_size - 1:
            (folder / "lost").touch()
            os.kill(os.getpid(), LOSSES[how])

    try:
        _run(fn, rank, world_size, (lose, *args), {}, folder, timeout, backend)
    except Exception:
        traceback.print_exc()
        output.flush()
        os._exit(1)  # without the clean-up of a process group that has lost a member
