"""What a rank sends: a log of every call of `torch.distributed`, with bytes by arithmetic."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch.distributed as dist


class Collective(NamedTuple):
    """One call, as this rank sees it."""

    name: str
    """Function of `torch.distributed`."""
    sent_bytes: int
    """Bytes this rank sends to other ranks, by the arithmetic in `_sent_bytes`."""
    buffer_bytes: int
    """Bytes of the larger of what goes in and what comes out."""
    group_size: int


class CollectiveLog(list[Collective]):
    """Calls in order, with sums."""

    def calls(self, name: str | None = None) -> int:
        """Number of calls, of one function or of all."""
        return sum(name in (None, call.name) for call in self)

    def sent_bytes(self, name: str | None = None) -> int:
        """Bytes sent to other ranks, by one function or by all."""
        return sum(call.sent_bytes for call in self if name in (None, call.name))


# name -> (argument that goes in, argument that comes out)
_BUFFERS = {
    "all_to_all_single": ("input", "output"),
    "all_to_all": ("input_tensor_list", "output_tensor_list"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "all_gather": ("tensor", "tensor_list"),
    "reduce_scatter_tensor": ("input", "output"),
    "reduce_scatter": ("input_list", "output"),
    "all_reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "reduce": ("tensor", "tensor"),
    "gather": ("tensor", "gather_list"),
    "scatter": ("scatter_list", "tensor"),
    "isend": ("tensor", "tensor"),
    "send": ("tensor", "tensor"),
    "irecv": ("tensor", "tensor"),
    "recv": ("tensor", "tensor"),
    "batch_isend_irecv": ("p2p_op_list", "p2p_op_list"),
}


@contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """Record every collective and point-to-point call of this rank while the context is open.

    Every loaded module that holds one of the functions of `torch.distributed` is pointed at a
    recorder, so names imported earlier count too; a call made by another call does not count twice.
    Functional collectives (`torch.distributed._functional_collectives`) are not seen.
    """
    log, depth = CollectiveLog(), [0]
    with replaced(lambda name, function: _recorder(name, function, log, depth)):
        yield log


@contextmanager
def replaced(make: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """Every collective and point-to-point function of `torch.distributed` replaced, wherever it was imported.

    Args:
        make: given the name and the function, what stands in its place.
    """
    stand_ins = {}
    for name in _BUFFERS:
        for module in (dist, dist.distributed_c10d):
            function = getattr(module, name)
            if function not in stand_ins:
                stand_ins[function] = make(name, function)
    places = [
        (vars(module), attribute, value)
        for module in list(sys.modules.values())
        for attribute, value in list(vars(module).items())
        if callable(value) and isinstance(value, FunctionType) and value in stand_ins
    ]
    for namespace, attribute, value in places:
        namespace[attribute] = stand_ins[value]
    try:
        yield
    finally:
        for namespace, attribute, value in places:
            namespace[attribute] = value


def named(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, those that the function itself passes on too."""
    bound = signature.bind(*args, **kwargs).arguments
    return bound | bound.pop("kwargs", {})


def _recorder(name: str, function: Callable, log: CollectiveLog, depth: list[int]) -> Callable:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        bound = named(signature, args, kwargs)
        peers = bound["p2p_op_list"][0] if name == "batch_isend_irecv" else None
        group = peers.group if peers else bound.get("group")
        size = dist.get_world_size(group)
        if depth[0] == 0 and size > 0:  # -1: this rank is not in the group and takes no part
            going, coming = (_bytes(bound.get(argument)) for argument in _BUFFERS[name])
            log.append(Collective(name, _sent_bytes(name, bound, group, size), max(going, coming), size))
        depth[0] += 1
        try:
            return function(*args, **kwargs)
        finally:
            depth[0] -= 1

    return recorded


def _bytes(buffer: Any) -> int:
    """Bytes of a tensor, of a list of tensors or point-to-point calls, or of nothing."""
    if buffer is None:
        return 0
    if isinstance(buffer, (list, tuple)):
        return sum(_bytes(getattr(item, "tensor", item)) for item in buffer)
    return buffer.numel() * buffer.element_size()


def _sent_bytes(name: str, bound: dict[str, Any], group: dist.ProcessGroup | None, size: int) -> int:
    """Bytes to other ranks: what a direct exchange sends; all_reduce as reduce-scatter and all-gather.

    A ring sends the same number per rank for all_gather, reduce_scatter and all_reduce.
    """
    going = _bytes(bound.get(_BUFFERS[name][0]))
    me = dist.get_rank(group)
    if name == "batch_isend_irecv":
        return sum(_bytes(op.tensor) for op in bound["p2p_op_list"] if op.op.__name__ == "isend")
    if name in ("isend", "send"):
        return going
    if name in ("irecv", "recv"):
        return 0
    if name in ("all_gather_into_tensor", "all_gather"):
        return going * (size - 1)
    if name == "all_reduce":
        return 2 * going * (size - 1) // size
    if name in ("broadcast", "scatter", "reduce", "gather"):
        end = "src" if name in ("broadcast", "scatter") else "dst"
        root = bound.get(f"group_{end}")
        if root is None:
            root = dist.get_group_rank(group or dist.group.WORLD, bound.get(end) or 0)
        if name == "broadcast":
            return going * (size - 1) if me == root else 0
        if name == "scatter":
            return going * (size - 1) // size if me == root else 0
        return 0 if me == root else going
    if name in ("all_to_all", "reduce_scatter"):
        return going - _bytes(bound[_BUFFERS[name][0]][me])
    splits = bound.get("input_split_sizes") if name == "all_to_all_single" else None
    if splits is None or len(splits) == 0:
        return going * (size - 1) // size
    row = going // bound["input"].shape[0] if bound["input"].shape[0] else 0
    return going - int(splits[me]) * row
