"""Timing on a GPU: medians by CUDA events, what the chip reaches at best, peak memory."""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import torch

CYCLES = 2e9
"""Of the GPU's clock in a second, about."""
LONGEST_AHEAD = 0.5
"""Seconds. What takes the CPU longer than that to launch takes the GPU longer to run."""


def milliseconds(function: Callable[[], object], repeats: int = 20, warm_up: int = 10) -> float:
    """Median of `repeats` runs, each between two CUDA events.

    All are queued behind other work that lasts until the last is launched, as in training, where the CPU is
    ahead: launches take no time of their own.
    """
    for _ in range(warm_up):
        function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    ahead = min(1.2 * repeats * (time.perf_counter() - began), LONGEST_AHEAD)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(int(ahead * CYCLES))
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def fla_with_flash_qla(there: bool) -> AbstractContextManager:
    """Let fla give the rule to flash-qla or run its own kernels; megatron-core installs no flash-qla."""
    return mock.patch.dict(os.environ, FLA_FLASH_QLA=str(int(there)))


def peak_gib(function: Callable[[], object]) -> float:
    """Memory that a run needs beyond what was allocated before it, at its peak, GiB."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def matmul_tflops(size: int = 8192) -> float:
    """What torch reaches on random bf16 square matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b) / 1e9


def copy_terabytes() -> float:
    """Bytes read and written per second by a device copy, TB/s."""
    a, b = (torch.randn(2**29, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * a.nbytes / milliseconds(lambda: b.copy_(a)) / 1e9
