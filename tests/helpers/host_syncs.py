"""Where a step makes the CPU wait for the device, counted where there is no device to wait for."""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_TORCH = str(Path(torch.__file__).parent)
_SYNCS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Torch marks so what gives a number to Python (`item`, `bool`, `int`, `float`, `equal`: all are
`aten::_local_scalar_dense` or likewise tagged) and what gives a tensor as long as its data says
(`nonzero`, `masked_select`, `unique`): a GPU must have computed the data by then."""
_COPIES = {"cpu", "cuda", "tolist", "numpy", "__array__"}
"""What reads memory without an operation that torch would dispatch, once the tensor is on the CPU."""
_MOVES = {"to", "tensor", "as_tensor"}
"""What copies to another device if one is named."""


class HostSyncs(Counter[tuple[str, str]]):
    """How often, by (operation, "file:line function" that asked)."""

    def grown(self, fewer: "HostSyncs") -> "HostSyncs":
        """What is here more often than in `fewer`."""
        return HostSyncs(self - fewer)

    def __str__(self) -> str:
        return (
            "\n".join(f"{count} x {name} at {place}" for (name, place), count in sorted(self.items()))
            or "none"
        )


@contextmanager
def count_host_syncs() -> Iterator[HostSyncs]:
    """Count while the context is open: `item`, `tolist`, `cpu`, `numpy`, `to` a device, `bool`, `int`,
    `float`, `index`, `equal`, `nonzero`, boolean indexing and what else has a size that data decide.

    Counts forward and backward, which runs on the same thread on a CPU. Everything that would move to another
    device counts, either way, since a copy from ordinary memory waits too.
    """
    syncs = HostSyncs()
    with _Methods(syncs), _Operations(syncs):
        yield syncs


class _Methods(TorchFunctionMode):
    def __init__(self, syncs: HostSyncs):
        super().__init__()
        self.syncs = syncs

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _COPIES or (name in _MOVES and _names_device(*args[1:], **kwargs)):
            self.syncs[name, _place()] += 1
        if name in ("tensor", "as_tensor") and (read := _tensors_in(args[0])):
            self.syncs["item", _place()] += read
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __init__(self, syncs: HostSyncs):
        super().__init__()
        self.syncs = syncs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            self.syncs[func.overloadpacket.__name__, _place()] += 1
        return func(*args, **kwargs)


def _waits(func, args: tuple, kwargs: dict) -> bool:
    packet = func.overloadpacket
    if packet in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if packet is torch.ops.aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return any(tag in func.tags for tag in _SYNCS)


def _tensors_in(values: object) -> int:
    """Tensors in a nested list, each of which `torch.tensor` reads without an operation that is seen."""
    if not isinstance(values, (list, tuple)):
        return 0
    return sum(1 if isinstance(value, Tensor) else _tensors_in(value) for value in values)


def _names_device(*args, device=None, **_) -> bool:
    return device is not None or any(isinstance(value, (str, torch.device, Tensor)) for value in args)


def _place() -> str:
    """The innermost line outside torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and not frame.filename.startswith((_TORCH, "<")):
            return f"{frame.filename}:{frame.lineno} {frame.name}"
    return "unknown"
