"""What every test gets: seeds, skips that say what is missing, and unwritten memory that shows."""

import random
from collections.abc import Callable
from functools import wraps

import numpy
import pytest
import torch
from torch import Tensor

from megatron_gdn import cpu

# Counted before megatron_gdn.cpu may answer for the machine; counting does not open CUDA, so ranks can fork.
NUM_DEVICES = torch.cuda.device_count()


def _filled_with_nan(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`allocate`, but floating memory that nobody has written yet holds NaN instead of leftovers."""

    @wraps(allocate)
    def allocate_nan(*args, **kwargs):
        out = allocate(*args, **kwargs)
        if out.is_floating_point() and kwargs.get("out") is None:
            out.detach().fill_(float("nan"))
        return out

    return allocate_nan


# For good, not per test: a teardown would undo whoever wraps these functions later (megatron_gdn.cpu).
torch.empty = _filled_with_nan(torch.empty)
torch.empty_like = _filled_with_nan(torch.empty_like)
torch.Tensor.new_empty = _filled_with_nan(torch.Tensor.new_empty)

# Before any test imports the host, and before ranks are forked; nothing happens where there is a GPU.
cpu.enable()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed Python, numpy and torch alike before each test, whatever ran before it."""
    value = 1234
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)
    return value


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu(num)` where there are fewer devices."""
    for marker in item.iter_markers("gpu"):
        needed = marker.kwargs.get("num", marker.args[0] if marker.args else 1)
        if needed > NUM_DEVICES:
            pytest.skip(f"needs {needed} CUDA device(s), found {NUM_DEVICES}")
