"""A folder of safetensors read row by row, and such files written piece by piece.

The library's own writer wants all tensors of a file at once; ours holds one piece. Source of the format:
huggingface/safetensors, README.md, "Format".
"""

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_gdn.checkpoint.huggingface.table import Rows, Shape

try:
    from safetensors import SafetensorError, safe_open
except ImportError:
    raise ValueError("convert needs safetensors; pip install safetensors.") from None

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of a language model's tensors, by safetensors' name."""
NAMES = {dtype: name for name, dtype in FLOATS.items()}
_BYTES = {
    8: "F64 I64 U64 C64",
    4: "F32 I32 U32",
    2: "F16 BF16 I16 U16",
    1: "F8_E4M3 F8_E5M2 F8_E8M0 I8 U8 BOOL",
}
ITEM_BYTES = {name: size for size, names in _BYTES.items() for name in names.split()}
PIECE_BYTES = 64 * 2**20
"""At most so much of a tensor that is only copied is held at once, if it has more than one row."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".index"}


class Info(NamedTuple):
    """What a file's header says of a tensor."""

    dtype: str
    shape: Shape
    file: str

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Folder:
    """A Hugging Face checkpoint, or what a conversion keeps of one.

    Attributes:
        path: the folder.
        config: content of config.json.
        tensors: of the checkpoint, in the order of its files.
        places: the file, in `path`, where a tensor can be read.
        files: names of the files that hold no weights and go along with them.
    """

    path: Path
    config: dict
    tensors: dict[str, Info]
    places: dict[str, str]
    files: list[str]

    def open(self) -> "RowReader":
        """A reader of the tensors in `places`, for one thread."""
        return RowReader(self)


def read_folder(path: Path) -> Folder:
    """Read config.json and every header of a Hugging Face checkpoint.

    Raises:
        ValueError: a file is missing, cut or at odds with the index, with its name.
    """
    config = _read_json(path / "config.json")
    if (path / INDEX).exists():
        weight_map = _read_json(path / INDEX).get("weight_map", {})
        files = sorted(set(weight_map.values()))
    elif (path / SINGLE).exists():
        weight_map, files = None, [SINGLE]
    else:
        raise ValueError(f"{path} has neither {INDEX} nor {SINGLE}; name a Hugging Face checkpoint.")
    tensors: dict[str, Info] = {}
    for file in files:
        for name, info in read_header(path / file).items():
            if weight_map is not None and weight_map.get(name) != file:
                raise ValueError(
                    f"{path / file} holds {name}, which {INDEX} has in {weight_map.get(name)}; "
                    "copy the checkpoint again."
                )
            tensors[name] = info
    missing = sorted((weight_map or {}).keys() - tensors.keys())
    if missing:
        raise ValueError(
            f"{path}: {INDEX} names {missing[0]}, which is in no file; copy the checkpoint again."
        )
    places = {name: info.file for name, info in tensors.items()}
    return Folder(path, config, tensors, places, side_files(path))


def side_files(path: Path) -> list[str]:
    """Configuration, tokenizer, templates: every plain file of a checkpoint but weights and hidden ones."""
    return sorted(
        file.name
        for file in path.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and file.suffix not in _WEIGHTS
        and not file.name.endswith(".index.json")
    )


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); name a Hugging Face checkpoint."
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy it again.") from None


def read_header(path: Path) -> dict[str, Info]:
    """Tensors of a safetensors file, which must be as long as its header says.

    Raises:
        ValueError: the file is missing or cut, or has tensors of a type that is not known.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; copy the checkpoint again.")
    try:
        with safe_open(path, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            found = {
                name: Info(each.get_dtype(), tuple(each.get_shape()), path.name)
                for name, each in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut ({error}); copy it again.") from None
    for name, info in found.items():
        if info.dtype not in ITEM_BYTES:
            raise ValueError(f"{path}: {name} has the unknown type {info.dtype}.")
    return found


class RowReader:
    """Reads rows of a folder's tensors; files stay open until the end of a `with`."""

    def __init__(self, folder: Folder):
        self._folder = folder
        self._opened: dict[str, object] = {}

    def __enter__(self) -> "RowReader":
        return self

    def __exit__(self, *_) -> None:
        for opened in self._opened.values():
            opened.__exit__(None, None, None)
        self._opened.clear()

    def rows(self, rows: Rows) -> Tensor:
        """These rows, [stop - start, columns] or [stop - start], in the tensor's own dtype."""
        shape = self._folder.tensors[rows.name].shape
        source = self._file(rows.name).get_slice(rows.name)
        if len(shape) < 3:
            return source[rows.start : rows.stop]
        inner = prod(shape[1:-1])
        first, last = rows.start // inner, -(-rows.stop // inner)
        planes = source[first:last].reshape(-1, shape[-1])
        return planes[rows.start - first * inner : rows.stop - first * inner]

    def pieces(self, name: str) -> Iterator[Tensor]:
        """A whole tensor, bit for bit, in pieces of at most PIECE_BYTES or one row."""
        info = self._folder.tensors[name]
        if not info.shape or 0 in info.shape:
            yield self._file(name).get_tensor(name)
            return
        source = self._file(name).get_slice(name)
        step = max(1, PIECE_BYTES * info.shape[0] // info.num_bytes)
        for start in range(0, info.shape[0], step):
            yield source[start : start + step]

    def _file(self, name: str):
        file = self._folder.places[name]
        if file not in self._opened:
            self._opened[file] = safe_open(self._folder.path / file, "pt").__enter__()
        return self._opened[file]


def write_file(path: Path, tensors: dict[str, Info], pieces: Callable[[str], Iterable[Tensor]]) -> None:
    """Write a safetensors file, and force it to the disk.

    Args:
        path: the file.
        tensors: what it is to hold.
        pieces: the parts of a tensor along its rows, in order, in its dtype.
    """
    # Widest types first keeps every tensor aligned to its type, as the library's own writer does.
    names = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name].dtype])
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        info = tensors[name]
        header[name] = {
            "dtype": info.dtype,
            "shape": info.shape,
            "data_offsets": [end, end + info.num_bytes],
        }
        end += info.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            stop = file.tell() + tensors[name].num_bytes
            for piece in pieces(name):
                file.write(memoryview(piece.contiguous().reshape(-1).view(torch.uint8).numpy()))
            assert file.tell() == stop, f"{name}: {file.tell() - stop:+} bytes against its header"
        sync(file)


def write_index(path: Path, tensors: dict[str, Info]) -> None:
    """Write the index of a checkpoint of several files."""
    content = {
        "metadata": {"total_size": sum(info.num_bytes for info in tensors.values())},
        "weight_map": {name: info.file for name, info in sorted(tensors.items())},
    }
    write_json(path / INDEX, content)


def write_json(path: Path, content) -> None:
    """Write JSON, and force it to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        sync(file)


def sync(file) -> None:
    """Force what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())
