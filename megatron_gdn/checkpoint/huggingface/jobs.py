"""What both directions share: checks before, many files at once, and rows put together."""

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_gdn.checkpoint.huggingface.folder import Info
from megatron_gdn.checkpoint.huggingface.partial import PartialFolder
from megatron_gdn.checkpoint.huggingface.table import RowMap, Rows, Shape

LAYOUT = "layout.json"
"""In the folder that a conversion keeps beside its checkpoint: dtype, shape and file of every tensor."""
KEPT, KEPT_TENSORS = "huggingface", "kept.safetensors"
"""That folder, and its file of the tensors that the weights do not tell."""
_SHOWN = 5


def gather(
    rows: RowMap, cut: Rows, shape: Shape, dtype: torch.dtype, read: Callable[[Rows], Tensor]
) -> Tensor:
    """Rows of a tensor put together from those of others; padding is zero.

    Args:
        rows: what the tensor is made of.
        cut: which of its rows.
        shape: its shape.
        dtype: dtype of the answer, at least as wide as that of its parts.
        read: gives rows of the others.

    Returns:
        [rows, columns] or [rows]; may be what `read` gave.
    """
    columns = shape[-1:] if len(shape) > 1 else ()
    parts = rows.cut(cut.start, cut.stop)
    if len(parts) == 1 and parts[0].stop - parts[0].start == cut.stop - cut.start:
        return read(parts[0]).reshape(-1, *columns).to(dtype)  # embeddings are large, so no second copy
    out = torch.empty((cut.stop - cut.start, *columns), dtype=dtype)
    at = 0
    for part in parts:
        taken = part.stop - part.start
        out[at : at + taken] = read(part).reshape(taken, *columns)
        at += taken
    out[at:] = 0
    return out


def check_same(got: dict[str, Shape], want: dict[str, Shape], where: str) -> None:
    """Refuse tensors that are missing, unknown or of another shape.

    Raises:
        ValueError: names the first few.
    """
    faults = [f"{name} is missing" for name in sorted(want.keys() - got.keys())]
    faults += [f"{name} is unknown" for name in sorted(got.keys() - want.keys())]
    faults += [
        f"{name} is {list(got[name])} instead of {list(want[name])}"
        for name in sorted(got.keys() & want.keys())
        if tuple(got[name]) != tuple(want[name])
    ]
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(
            f"{where} does not hold the model that its sizes describe: {', '.join(faults[:_SHOWN])}{more}."
        )


def fingerprint(folders: Iterable[Path]) -> list[list]:
    """Name, size and time of every file, by which a changed source is known."""
    files = sorted({file for folder in folders for file in folder.iterdir() if file.is_file()})
    stats = [(file, file.stat()) for file in files]
    return [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def check_space(target: Path, needed: int) -> None:
    """Refuse a disk that is too small.

    Raises:
        ValueError: it is.
    """
    partial = target.with_name(target.name + ".partial")
    there = (
        sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()) if partial.exists() else 0
    )
    place = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free + there
    if free < needed:
        raise ValueError(f"{target} needs {needed / 1e9:,.1f} GB, but {place} has {free / 1e9:,.1f} GB free.")


def memory_budget(tensors: Iterable[Info]) -> int:
    """Bytes that a conversion may hold at once: one and a half times the largest Hugging Face file."""
    files: dict[str, int] = {}
    for info in tensors:
        files[info.file] = files.get(info.file, 0) + info.num_bytes
    return max(files.values()) * 3 // 2


class Memory:
    """Lets threads begin only while what they need together is within a budget."""

    def __init__(self, budget: int):
        """Bytes."""
        self._free = self._budget = budget
        self._changed = threading.Condition()

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
        """Wait for so many bytes and have them; who needs more than the budget has all of it, alone."""
        num_bytes = min(num_bytes, self._budget)
        with self._changed:
            self._changed.wait_for(lambda: num_bytes <= self._free)
            self._free -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._free += num_bytes
                self._changed.notify_all()


class Interrupted(Exception):
    """Another thread has failed, or the user has stopped the job."""


def run(
    folder: PartialFolder,
    files: dict[str, int],
    write: Callable[[str, Callable[[int], None]], str],
    workers: int,
    memory: dict[str, int],
    budget: int,
) -> list[str]:
    """Write files, several at once, but not those that an earlier attempt has finished.

    Args:
        folder: where they are written.
        files: their names and about how many bytes each takes.
        write: writes one, reports bytes done, returns notes about it.
        workers: threads.
        memory: bytes that writing a file needs at once.
        budget: bytes that all threads may need together.

    Returns:
        The notes of each file.
    """
    stop, shared = threading.Event(), Memory(budget)
    with tqdm(total=sum(files.values()), unit="B", unit_scale=True, disable=None, desc="convert") as bar:

        def advance(num_bytes: int) -> None:
            if stop.is_set():
                raise Interrupted
            bar.update(num_bytes)

        def one(file: str) -> str:
            advance(0)
            try:
                notes = folder.finished(file)
                if notes is None:
                    with shared.take(memory[file]):
                        notes = write(file, advance)
                    folder.finish(file, notes)
                else:
                    advance(files[file])
            except BaseException:
                stop.set()
                raise
            return notes

        torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # copies; the files are what is done in parallel
        pool = ThreadPoolExecutor(workers)
        try:
            jobs = [pool.submit(one, file) for file in files]
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            failures = [job.exception() for job in done if job.exception()]
            # What has stopped the others, not that they were stopped.
            for failure in sorted(failures, key=lambda each: isinstance(each, Interrupted)):
                raise failure
            return [job.result() for job in jobs]
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(torch_threads)
