"""Ranks for the benchmark: one GPU each and NCCL, or gloo on the CPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.helpers.distributed import run_ranks

_SIGNS = ("OutOfMemoryError", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to CUDA calloc")


class OutOfMemory(Exception):
    """A rank asked for more memory than its GPU has."""


class Launcher(NamedTuple):
    """How ranks are started."""

    backend: str
    start: str
    timeout: float
    """Seconds, of all that one call of `run` does."""

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """As `tests.helpers.distributed.run_ranks`.

        Raises:
            OutOfMemory: a rank had too little memory; all have ended.
            AssertionError: any other failure.
        """
        try:
            return run_ranks(
                fn, world_size, *args, timeout=self.timeout, start=self.start, backend=self.backend
            )
        except AssertionError as error:
            if any(sign in str(error) for sign in _SIGNS):
                raise OutOfMemory(str(error)) from None
            raise


GPU = Launcher("nccl", "spawn", 1500.0)
CPU = Launcher("gloo", "fork", 300.0)
