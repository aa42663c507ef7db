"""Megatron's `torch_dist` checkpoints, read and written tensor by tensor in one process.

torch's own file reader and writer do the work; what is ours is that a tensor is made when its turn has come.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    check_is_distributed_checkpoint,
    save_config,
)
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter, LoadPlan
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_gdn.checkpoint.huggingface.table import Rows, Shape

TRACKER = "latest_checkpointed_iteration.txt"


class Planned(NamedTuple):
    """A tensor to be written."""

    shape: Shape
    dtype: torch.dtype


def planes(shape: Shape) -> int:
    """Pieces in which a tensor is written and read: experts one by one, others whole."""
    return shape[0] if len(shape) == 3 and shape[1] > 1 else 1


def piece_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of such a piece."""
    return prod(shape) * dtype.itemsize // planes(shape)


class Writer:
    """Writes a checkpoint of one file per part of the model."""

    def __init__(
        self,
        path: Path,
        parts: dict[str, dict[str, Planned]],
        objects: dict[str, object],
        make: Callable,
    ):
        """Plan everything; writes nothing.

        Args:
            path: folder of the checkpoint.
            parts: the tensors of each file.
            objects: what else it holds, by key; goes into the first file.
            make: (report of bytes done) -> context manager of a function that gives rows of a tensor.
        """
        self._writer = FileSystemWriter(path, thread_count=1, per_thread_copy_ahead=0)
        self._objects, self._make = objects, make
        plans = [
            SavePlan([item for key in part for item in _items(key, part[key])]) for part in parts.values()
        ]
        plans[0].items.extend(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        plans, self._metadata = planner.create_global_plan(plans)
        plans = self._writer.prepare_global_plan(plans)
        self._plans = dict(zip(parts, plans, strict=True))

    def file(self, part: str) -> str:
        """Name of a part's file."""
        return f"{self._plans[part].storage_data.prefix}0.distcp"

    def write(self, part: str, advance: Callable[[int], None]) -> str:
        """Write a part's file, reporting bytes done. Returns what `finish` needs to know of it."""
        with self._make(advance) as rows:
            results = self._writer.write_data(self._plans[part], _LazyPlanner(rows, self._objects)).value()
        return pickle.dumps(results).hex()

    def finish(self, notes: list[str]) -> None:
        """Write what makes the files a checkpoint.

        Args:
            notes: the answers of `write`.
        """
        self._writer.finish(self._metadata, [pickle.loads(bytes.fromhex(note)) for note in notes])
        save_config(CheckpointingConfig("torch_dist"), str(self._writer.path))


def _items(key: str, tensor: Planned) -> list[WriteItem]:
    """What is to be written of a tensor, one item per piece."""
    count = planes(tensor.shape)
    size = torch.Size((tensor.shape[0] // count, *tensor.shape[1:]))
    items = []
    for number in range(count):
        offsets = torch.Size((number, *[0] * (len(size) - 1)))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, size),
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
        )
        index = MetadataIndex(key, offsets, number)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return items


class _LazyPlanner(DefaultSavePlanner):
    """Gives data when the writer asks for it."""

    def __init__(self, rows: Callable[[Rows], Tensor], objects: dict[str, object]):
        super().__init__(flatten_state_dict=False)
        self._rows, self._objects = rows, objects

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([self._objects[key]], stream)
            return stream
        data = write_item.tensor_data
        size = data.chunk.sizes
        inner = size[1] if planes(data.size) > 1 else 1
        start = data.chunk.offsets[0] * inner
        tensor = self._rows(Rows(key, start, start + size[0] * inner))
        assert tensor.dtype == data.properties.dtype, f"{key}: {tensor.dtype}"
        return tensor.reshape(size)


class Reader:
    """Reads whole tensors of a checkpoint, whatever parallel sizes wrote it. For one thread."""

    def __init__(self, path: Path, metadata=None, keep: int = 0):
        """Read the metadata.

        Args:
            path: folder of the checkpoint.
            metadata: that of another reader of the same checkpoint.
            keep: bytes that it may remember, for tensors of the other side made of the same ones; the last
                that it has read stays in any case.

        Raises:
            ValueError: no torch_dist checkpoint.
        """
        if not check_is_distributed_checkpoint(str(path)):
            raise ValueError(
                f"{path} is no torch_dist checkpoint (it has no metadata.json); name the folder given to "
                "--save, or one of its iterations."
            )
        self.path, self._keep, self._reader = path, keep, FileSystemReader(path)
        if metadata is None:
            self.metadata = self._reader.read_metadata()
            self._check_files()
        else:
            self.metadata = metadata
        self._reader.set_up_storage_reader(self.metadata, True)
        self._kept: OrderedDict[tuple[str, int], Tensor] = OrderedDict()

    def _check_files(self) -> None:
        """Refuse files that are missing, or shorter than the metadata says."""
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            file = self.path / name
            if not file.is_file():
                raise ValueError(f"{file} is missing; copy the checkpoint again.")
            if file.stat().st_size < end:
                raise ValueError(
                    f"{file} is cut, it has {file.stat().st_size:,} of {end:,} bytes; copy it again."
                )

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """All of its tensors, the optimizer's included."""
        found = self.metadata.state_dict_metadata.items()
        return {key: entry for key, entry in found if isinstance(entry, TensorStorageMetadata)}

    def common_state(self) -> dict:
        """What is no tensor: arguments, iteration."""
        return load_common_state_dict(str(self.path))

    def rows(self, rows: Rows) -> Tensor:
        """These rows, in the stored dtype; they must not cross from one expert to the next."""
        entry = self.metadata.state_dict_metadata[rows.name]
        count = planes(entry.size)
        inner = entry.size[1] if count > 1 else 1
        plane = rows.start // inner if count > 1 else 0
        tensor = self._plane(rows.name, plane)
        start = rows.start - plane * inner
        assert rows.stop - plane * inner <= len(tensor), rows
        return tensor[start : rows.stop - plane * inner]

    def _plane(self, key: str, plane: int) -> Tensor:
        """An expert's part of a tensor, or a whole one; the last few are remembered."""
        if (key, plane) not in self._kept:
            entry = self.metadata.state_dict_metadata[key]
            size = torch.Size((1, *entry.size[1:])) if planes(entry.size) > 1 else entry.size
            offsets = torch.Size((plane, *[0] * (len(size) - 1)))
            wanted = ChunkStorageMetadata(offsets, size)
            stop = plane + size[0]
            near = [c for c in entry.chunks if c.offsets[0] < stop and c.offsets[0] + c.sizes[0] > plane]
            items = create_read_items_for_chunk_list(key, replace(entry, chunks=near), [wanted])
            if sum(item.lengths.numel() for item in items) != size.numel():
                raise ValueError(f"{self.path}: parts of {key} are missing; save the checkpoint again.")
            self._forget(size.numel() * entry.properties.dtype.itemsize)
            target = torch.empty(size, dtype=entry.properties.dtype)
            self._reader.read_data(LoadPlan(items), _IntoTensor(target)).wait()
            if planes(entry.size) > 1:
                target = target[0]
            elif target.dim() == 3:
                target = target[:, 0]
            self._kept[key, plane] = target
        self._kept.move_to_end((key, plane))
        return self._kept[key, plane]

    def _forget(self, num_bytes: int) -> None:
        """Make room for so many bytes; what was used last stays longest."""
        while self._kept and sum(t.nbytes for t in self._kept.values()) + num_bytes > self._keep:
            self._kept.popitem(last=False)


class _IntoTensor(DefaultLoadPlanner):
    """Has everything read into one tensor."""

    def __init__(self, target: Tensor):
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._target


def find_checkpoint(folder: Path) -> Path:
    """The checkpoint that a folder means: itself, or the last one saved in it.

    Raises:
        ValueError: there is none.
    """
    tracker = folder / TRACKER
    if not tracker.exists():
        return folder
    last = tracker.read_text(encoding="utf-8").strip()
    path = folder / (f"iter_{int(last):07d}" if last.isdigit() else last)
    if not path.is_dir():
        raise ValueError(f"{tracker} names {last!r}, but {path} is missing; name one of its iterations.")
    return path
