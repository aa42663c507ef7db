"""Megatron to Hugging Face."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gdn.checkpoint.huggingface import jobs
from megatron_gdn.checkpoint.huggingface.config_json import (
    changed_settings,
    read_arguments,
    read_model,
    text_config,
    write_config,
)
from megatron_gdn.checkpoint.huggingface.folder import (
    FLOATS,
    NAMES,
    PIECE_BYTES,
    SINGLE,
    Folder,
    Info,
    RowReader,
    read_folder,
    side_files,
    write_file,
    write_index,
    write_json,
)
from megatron_gdn.checkpoint.huggingface.partial import PartialFolder
from megatron_gdn.checkpoint.huggingface.table import ZERO_CENTRED, Dialect, Rows, build_table
from megatron_gdn.checkpoint.huggingface.to_megatron import language_names
from megatron_gdn.checkpoint.huggingface.torch_dist import Reader, find_checkpoint, piece_bytes, planes
from megatron_gdn.config import Qwen35Config

SHARD_BYTES = 5 * 10**9
"""At most so much per file, where no origin says which tensor belongs to which."""
_COPIES = 4
"""Copies of a piece that are held while it is made: as stored, as read, as put together, as converted."""
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "mtp.")
_OTHER_KEYS = ("optimizer", "chained_", "rng_state", "rerun_state")


def find_origin(like: Path | None, source: Path, checkpoint: Path) -> Folder | None:
    """The Hugging Face side that the checkpoint came from, if it is known.

    Args:
        like: a Hugging Face checkpoint or a converted one, as the user says.
        source: the folder given.
        checkpoint: the checkpoint in it.
    """
    places = [source, checkpoint.parent] if like is None else [like]
    for place in places:
        for kept in (place / jobs.KEPT, place):
            if (kept / jobs.LAYOUT).exists():
                return _read_kept(kept)
    return None if like is None else read_folder(like)


def _read_kept(path: Path) -> Folder:
    layout = json.loads((path / jobs.LAYOUT).read_text(encoding="utf-8"))
    tensors = {
        name: Info(dtype, tuple(shape), file) for name, (dtype, shape, file) in layout["tensors"].items()
    }
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    places = dict.fromkeys(layout["kept"], jobs.KEPT_TENSORS)
    return Folder(path, config, tensors, places, [file for file in side_files(path) if file != jobs.LAYOUT])


class Export:
    """A Megatron checkpoint that is known to fit.

    Attributes:
        tensors: of the Hugging Face checkpoint to be written.
        rounded: names of tensors that the type of the origin could not hold exactly.
    """

    def __init__(self, source: Path, like: Path | None, drop_mtp: bool):
        """Read the metadata and check all of it.

        Args:
            source: folder given to --save, or one of its iterations.
            like: origin, see `find_origin`.
            drop_mtp: leave multi-token prediction out.

        Raises:
            ValueError: anything that is missing, unknown, or of a wrong shape.
        """
        self.checkpoint = find_checkpoint(source)
        self.reader = Reader(self.checkpoint)
        self.origin = find_origin(like, source, self.checkpoint)
        self.rounded: set[str] = set()
        entries = self._model_entries()
        mtp_layers = len({key.split(".")[2] for key in entries if key.startswith("mtp.")})
        if mtp_layers > 1 and not drop_mtp:
            raise ValueError(
                f"{self.checkpoint} predicts {mtp_layers} tokens further, but Hugging Face's names hold one "
                "such layer; leave them out with --drop-mtp."
            )
        if drop_mtp:
            entries = {key: entry for key, entry in entries.items() if not key.startswith("mtp.")}
            mtp_layers = 0
        if self.origin is None:
            self.model = read_arguments(self._arguments())
            dialect = Dialect(mtp_layers=mtp_layers)
        else:
            self.model = read_model(self.origin.config)
            kept = (n for n in self.origin.tensors if not (drop_mtp and n.startswith("mtp.")))
            dialect = replace(Dialect.of(kept), mtp_layers=mtp_layers)
        self.mtp_layers = mtp_layers
        padded = entries.get("embedding.word_embeddings.weight")
        padded = self.model.vocab_size if padded is None else max(padded.size[0], self.model.vocab_size)
        config = Qwen35Config.from_model(self.model)
        self.table = build_table(config, self.model.vocab_size, padded, self.model.tied, dialect)
        shapes = {key: tuple(entry.size) for key, entry in entries.items()}
        jobs.check_same(shapes, self.table.megatron, str(self.checkpoint))
        for key, entry in entries.items():
            if entry.properties.dtype not in NAMES:
                raise ValueError(f"{self.checkpoint}: {key} is {entry.properties.dtype}, which is no weight.")
        self._check_settings()
        self.outside: list[str] = []
        self.tensors = self._new_tensors() if self.origin is None else self._tensors_like(dialect, drop_mtp)

    def _arguments(self) -> dict[str, Any]:
        """Of the run that saved the checkpoint; none in one that was converted."""
        stored = self.reader.common_state().get("args")
        return {} if stored is None else vars(stored)

    def _check_settings(self) -> None:
        """Refuse a checkpoint whose weights were trained for another function than config.json describes."""
        for name, got, value in changed_settings(self._arguments(), self.model):
            says = f"{self.origin.path / 'config.json'} says {value}" if self.origin else "config.json cannot"
            raise ValueError(
                f"{self.checkpoint} was trained with --{name.replace('_', '-')} {got}, but {says}: "
                "transformers would compute something else. --like names a folder that says the same, if "
                "there is one."
            )

    def _model_entries(self) -> dict:
        """The model's tensors; those of the optimizer are left alone."""
        entries = self.reader.tensors
        unknown = [key for key in entries if not key.startswith((*_MODEL_KEYS, *_OTHER_KEYS))]
        if unknown:
            raise ValueError(
                f"{self.checkpoint} holds {unknown[0]}, which belongs to no model of this project."
            )
        return {key: entry for key, entry in entries.items() if key.startswith(_MODEL_KEYS)}

    def _stored_dtype(self, name: str) -> torch.dtype:
        entries = self.reader.metadata.state_dict_metadata
        dtypes = {entries[part.name].properties.dtype for part in self.table.to_hf[name].parts}
        dtype = dtypes.pop()
        for each in dtypes:
            dtype = torch.promote_types(dtype, each)
        return dtype

    def _new_tensors(self) -> dict[str, Info]:
        """Tensors in their stored types, in files of at most SHARD_BYTES."""
        files, used = [[]], 0
        for name, shape in self.table.hf.items():
            info = Info(NAMES[self._stored_dtype(name)], shape, "")
            if used and used + info.num_bytes > SHARD_BYTES:
                files.append([])
                used = 0
            files[-1].append((name, info))
            used += info.num_bytes
        many = len(files) > 1
        return {
            name: info._replace(file=f"model-{number:05}-of-{len(files):05}.safetensors" if many else SINGLE)
            for number, file in enumerate(files, 1)
            for name, info in file
        }

    def _tensors_like(self, dialect: Dialect, drop_mtp: bool) -> dict[str, Info]:
        """Tensors in the types and files of the origin."""
        origin, table = self.origin.tensors, self.table.hf
        language = language_names(self.origin, dialect.prefix)
        self.outside = [name for name in origin if name not in language]
        if drop_mtp:
            language = {name for name in language if not name.startswith("mtp.")}
        if self.model.tied and "lm_head.weight" in language:
            embedding = f"{dialect.prefix}embed_tokens.weight"
            table["lm_head.weight"] = table[embedding]
            self.table.to_hf["lm_head.weight"] = self.table.to_hf[embedding]
        mtp = [name for name in language - table.keys() if name.startswith("mtp.")]
        if mtp and not self.mtp_layers:
            raise ValueError(
                f"{self.checkpoint} holds no multi-token prediction, but its origin has "
                f"{mtp[0]}; train with --mtp-num-layers 1, or leave them out with --drop-mtp."
            )
        added = {name for name in table if name.startswith("mtp.")} - language
        want = {name: shape for name, shape in table.items() if name not in added}
        jobs.check_same({name: origin[name].shape for name in language}, want, str(self.origin.path))
        found = {name: origin[name] for name in origin if name in language or name in self.outside}
        return found | {
            name: Info(NAMES[self._stored_dtype(name)], table[name], "model-mtp.safetensors")
            for name in table
            if name in added
        }

    def pieces(self, name: str, reader: Reader, origin: RowReader | None) -> Iterator[Tensor]:
        """A tensor of the language model in pieces: expert by expert, or whole.

        Args:
            name: the tensor.
            reader: reads the checkpoint.
            origin: reads the origin.
        """
        dtype, shape, _ = self.tensors[name]
        stored = self._stored_dtype(name)
        rows = self.table.to_hf[name]
        count = planes(shape)
        step = rows.length // count
        for start in range(0, rows.length, step):
            piece = jobs.gather(rows, Rows(name, start, start + step), shape, stored, reader.rows)
            if rows.parts[0].name.endswith(ZERO_CENTRED):
                piece = _uncentred(piece, origin.rows(Rows(name, start, start + step)) if origin else None)
            out = piece.to(FLOATS[dtype])
            if out.dtype != piece.dtype and not _same(out.to(piece.dtype), piece).all():
                self.rounded.add(name)
            yield out

    def read_bytes(self, name: str) -> int:
        """Bytes of the checkpoint that a piece of a tensor of the language model is made of."""
        entries = self.reader.metadata.state_dict_metadata
        parts = {part.name: entries[part.name] for part in self.table.to_hf[name].parts}
        return sum(piece_bytes(entry.size, entry.properties.dtype) for entry in parts.values())

    def memory(self, name: str) -> int:
        """Bytes that are held while a tensor is made."""
        if name in self.outside:
            return _COPIES * min(PIECE_BYTES, self.tensors[name].num_bytes)
        made = piece_bytes(self.tensors[name].shape, self._stored_dtype(name))
        return _COPIES * max(made, self.read_bytes(name))

    def config(self) -> dict | None:
        """A config.json that differs from the origin's, or None."""
        if self.origin is None:
            biggest = max(self.tensors.values(), key=lambda info: info.num_bytes)
            dtype = str(FLOATS[biggest.dtype]).removeprefix("torch.")
            return write_config(self.model, dtype, self.mtp_layers)
        text = text_config(self.origin.config)
        had = any(name.startswith("mtp.") for name in self.origin.tensors)
        if bool(self.mtp_layers) == had:
            return None
        text = text | {"mtp_num_hidden_layers": self.mtp_layers}
        whole = self.origin.config
        return whole | {"text_config": text} if "text_config" in whole else text


def convert(
    source: Path, target: Path, workers: int, like: Path | None = None, drop_mtp: bool = False
) -> str:
    """Convert a Megatron checkpoint into a Hugging Face one.

    Args:
        source: folder given to --save, or one of its iterations; any parallel sizes.
        target: folder to make.
        workers: files written at once.
        like: where names, types, files, tokenizer and tensors outside the language model are taken from.
        drop_mtp: leave multi-token prediction out.

    Returns:
        What was done, in a line or two.

    Raises:
        ValueError: the checkpoint cannot be converted; nothing has been written.
    """
    export = Export(source, like, drop_mtp)
    files: dict[str, dict[str, Info]] = {}
    for name, info in export.tensors.items():
        files.setdefault(info.file, {})[name] = info
    sizes = {file: sum(info.num_bytes for info in tensors.values()) for file, tensors in files.items()}
    jobs.check_space(target, sum(sizes.values()))
    sources = [export.checkpoint, *([export.origin.path] if export.origin else [])]
    job = {"to": "hf", "drop_mtp": drop_mtp, "source": jobs.fingerprint(sources)}
    folder = PartialFolder(target, job)
    try:
        outside = set(export.outside)

        def write(file: str, advance: Callable[[int], None]) -> str:
            keep = max((export.read_bytes(n) for n in files[file] if n not in outside), default=0)
            reader = Reader(export.checkpoint, export.reader.metadata, keep)
            with ExitStack() as stack:
                origin = stack.enter_context(export.origin.open()) if export.origin else None

                def pieces(name: str) -> Iterator[Tensor]:
                    carried = name in outside
                    for piece in origin.pieces(name) if carried else export.pieces(name, reader, origin):
                        advance(piece.nbytes)
                        yield piece

                write_file(folder.path / file, files[file], pieces)
            return json.dumps(sorted(export.rounded & files[file].keys()))

        memory = {file: max(map(export.memory, tensors)) for file, tensors in files.items()}
        notes = jobs.run(folder, sizes, write, workers, memory, jobs.memory_budget(export.tensors.values()))
        _write_rest(export, folder.path, list(files))
        folder.publish()
    finally:
        folder.close()
    rounded = sum(len(json.loads(note)) for note in notes)
    words = f"wrote {target}: {len(export.tensors)} tensors, {sum(sizes.values()):,} bytes"
    if rounded:
        words += f"; {rounded} tensors were rounded to the type that they have in {export.origin.path}"
    if export.origin is None:
        words += "; no tokenizer: its origin is not known, name it with --like"
    return words


def _same(x: Tensor, y: Tensor) -> Tensor:
    """Where both are the same number, or none."""
    return torch.isclose(x, y, rtol=0, atol=0, equal_nan=True)


def _uncentred(centred: Tensor, origin: Tensor | None) -> Tensor:
    """centred + 1; where nothing has changed since the conversion, the bits of the origin.

    Without the origin the answer is within half a unit in the last place of the sum; less 1 again it may
    differ from `centred` in its last bits, as fp32 near 1 is coarser than near 0.
    """
    plain = centred + 1
    if origin is None:
        return plain
    unchanged = (origin.to(torch.float32) - 1).to(centred.dtype)  # as the way there has computed it
    same = _same(centred, unchanged)
    dtype = torch.promote_types(plain.dtype, origin.dtype)
    return torch.where(same, origin.to(dtype), plain.to(dtype))


def _write_rest(export: Export, path: Path, files: list[str]) -> None:
    """Index, config.json and the files that go along."""
    for file in export.origin.files if export.origin else ():
        shutil.copyfile(export.origin.path / file, path / file)
    config = export.config()
    if config is not None:
        write_json(path / "config.json", config)
    if files != [SINGLE]:
        write_index(path, export.tensors)
