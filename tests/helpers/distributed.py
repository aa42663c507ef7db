"""Real ranks on one machine: processes on gloo, or on NCCL with a GPU each, that never outlive a test.

Nothing here imports megatron at import time, so a `conftest.py` can prepare the host first.
Imports are made once in the parent and inherited; a rank starts in a few milliseconds.
"""

import copy
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.collectives import CollectiveLog, count_collectives

__all__ = ["CollectiveLog", "alone", "before_ranks", "count_collectives", "make_groups", "run_ranks"]

before_ranks: list[Callable[[], None]] = []
"""Called in the parent before ranks are forked, in order: a place for `conftest.py` to prepare the host."""

_SEED = 1234
_PR_SET_PDEATHSIG = 1


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    start: str = "fork",
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(rank, world_size, *args, **kwargs)` in `world_size` processes of one process group.

    Every rank starts from the same random seed with one CPU thread. `fn` may be a closure; its
    result must pickle (tensors do).

    Args:
        fn: what every rank runs.
        world_size: number of processes.
        *args: passed on to `fn`.
        timeout: seconds until all ranks must have answered, and of every collective.
        start: "fork", or "spawn" where the ranks use CUDA, which a fork cannot; then each rank imports
            anew, and `fn` must be a function of a module.
        backend: "gloo", or "nccl", which gives rank r the GPU number r.
        **kwargs: passed on to `fn`.

    Returns:
        The result of every rank, in rank order.

    Raises:
        AssertionError: the first rank that failed and its traceback; or, out of time, the ranks
            that did not answer and where they stand. All processes have ended by then.
    """
    for prepare in before_ranks:
        prepare()
    deadline = time.monotonic() + timeout
    grace = 0.0
    context = multiprocessing.get_context(start)
    processes, pipes = [], {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(
                        *(fn, rank, world_size, args, kwargs, sender, Path(folder), timeout, backend),
                        os.getpid(),
                    ),
                )
                process.start()
                sender.close()  # so that a rank that dies closes the pipe
                processes.append(process)
                pipes[receiver] = rank
            results = _collect(processes, pipes, deadline, timeout, Path(folder))
            grace = 5.0
            return results
        finally:
            _end(processes, grace)
            for receiver in pipes:
                receiver.close()


def _collect(
    processes: list, pipes: dict[Connection, int], deadline: float, timeout: float, folder: Path
) -> list:
    """Results in rank order; AssertionError on the first failure or when time is up."""
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        pending = [pipe for pipe, rank in pipes.items() if rank not in results]
        left = deadline - time.monotonic()
        if left <= 0:
            late = [pipes[pipe] for pipe in pending]
            stacks = _stacks([processes[rank].pid for rank in late], [folder / f"stack-{r}" for r in late])
            raise AssertionError(f"ranks {late} did not answer in {timeout} s\n{stacks}")
        ready = wait(pending, timeout=min(left, 0.5))
        # a process that it started may hold the pipe of a dead rank open, so look at the rank too
        dead = [pipe for pipe in pending if processes[pipes[pipe]].exitcode is not None and not pipe.poll()]
        for pipe in [*ready, *(pipe for pipe in dead if pipe not in ready)]:
            rank = pipes[pipe]
            try:
                if not pipe.poll():
                    raise EOFError
                succeeded, result = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                code = processes[rank].exitcode
                raise AssertionError(f"rank {rank} died without an answer, exit code {code}") from None
            if not succeeded:
                raise AssertionError(f"rank {rank} of {len(processes)} failed\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(processes))]


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple,
    kwargs: dict,
    sender: Connection,
    folder: Path,
    timeout: float,
    backend: str,
    parent: int,
) -> None:
    """Body of one process: join, run, answer."""
    os.setsid()  # a process group of its own, so that what it starts can be ended with it
    _die_with(parent)
    with (folder / f"stack-{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            answer = pickle.dumps((True, _run(fn, rank, world_size, args, kwargs, folder, timeout, backend)))
        except BaseException:  # pytest's own outcomes are no Exception
            answer = pickle.dumps((False, traceback.format_exc()))
        sender.send_bytes(answer)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


def _run(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple,
    kwargs: dict,
    folder: Path,
    timeout: float,
    backend: str,
) -> Any:
    """Join the process group and call `fn`."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    if sys.platform == "linux":
        # otherwise gloo looks for this machine's own name, which not every machine can resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    return fn(rank, world_size, *args, **kwargs)


def _stacks(pids: list[int], files: list[Path]) -> str:
    """Have late ranks write where they stand, and read it."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    return "\n".join(f"{file.name}:\n{file.read_text() if file.exists() else ''}" for file in files)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when the parent is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _end(processes: list, grace: float) -> None:
    """Wait up to `grace` seconds for ranks to leave, then end every process and what it started."""
    limit = time.monotonic() + grace
    for process in processes:
        wait([process.sentinel], timeout=max(0.0, limit - time.monotonic()))
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()  # not yet, or no longer, the leader of a group
        process.join()
        process.close()


@contextmanager
def make_groups(tp: int = 1, cp: int = 1, **sizes: Any) -> Iterator[Any]:
    """The host's process groups for a forked rank, taken down at the end.

    Args:
        tp: tensor-parallel size.
        cp: context-parallel size.
        **sizes: further arguments of the host's `initialize_model_parallel`.

    Yields:
        `ProcessGroupCollection` with every group of the host.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp, **sizes)
    try:
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()


def alone(groups: Any) -> Any:
    """A copy of the host's groups in which every rank is alone; a collective call on all ranks.

    Args:
        groups: as `make_groups` yields them.
    """
    solo, one = dist.new_subgroups(1)[0], copy.copy(groups)
    for name, group in vars(groups).items():
        if isinstance(group, dist.ProcessGroup) and group.size() > 1:
            setattr(one, name, solo)
    return one
