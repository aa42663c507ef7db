"""Hugging Face to Megatron."""

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_gdn.checkpoint.huggingface import jobs
from megatron_gdn.checkpoint.huggingface.config_json import read_model
from megatron_gdn.checkpoint.huggingface.folder import (
    FLOATS,
    PIECE_BYTES,
    Folder,
    Info,
    read_folder,
    sync,
    write_file,
    write_json,
)
from megatron_gdn.checkpoint.huggingface.partial import PartialFolder
from megatron_gdn.checkpoint.huggingface.table import (
    FLOAT32_KEYS,
    ZERO_CENTRED,
    Dialect,
    Rows,
    Table,
    build_table,
)
from megatron_gdn.checkpoint.huggingface.torch_dist import TRACKER, Planned, Writer, piece_bytes
from megatron_gdn.config import Qwen35Config, model_arguments

VOCABULARY_MULTIPLE = 128
"""Megatron's --make-vocab-size-divisible-by, unless given."""
_COPIES = 3
"""Copies of a piece that are held while it is made: as read, as put together, as changed."""
RELEASE = "release"
"""What Megatron calls a checkpoint without optimizer: training starts from it at iteration 0."""


def language_names(folder: Folder, prefix: str) -> set[str]:
    """Names of the tensors that make the language model; the others are carried along."""
    return {name for name in folder.tensors if name.startswith((prefix, "mtp.", "lm_head."))}


def zero_centred_names(table: Table) -> list[str]:
    """Names of the tensors that Megatron holds less 1; in fp32 that may cost their last bits."""
    return [rows.parts[0].name for key, rows in table.to_megatron.items() if key.endswith(ZERO_CENTRED)]


class Source:
    """A Hugging Face checkpoint that is known to fit.

    Attributes:
        folder: its tensors.
        model: what config.json says.
        dialect: how it is written.
        table: both sides.
        planned: every Megatron tensor.
        outside: tensors that are carried along.
        kept: those, and the ones that cannot be computed back to the bit.
    """

    def __init__(self, path: Path, drop_mtp: bool = False):
        """Read the headers and check all of them.

        Args:
            path: the folder.
            drop_mtp: leave multi-token prediction out.

        Raises:
            ValueError: anything that is missing, unknown, cut, or of a wrong shape or type.
        """
        self.folder = read_folder(path)
        self.model = read_model(self.folder.config)
        self.dialect = Dialect.of(n for n in self.folder.tensors if not (drop_mtp and n.startswith("mtp.")))
        self.config = Qwen35Config.from_model(self.model)
        self.padded_vocab_size = -(-self.model.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        self.table = build_table(
            self.config, self.model.vocab_size, self.padded_vocab_size, self.model.tied, self.dialect
        )
        names = language_names(self.folder, self.dialect.prefix)
        self.outside = [name for name in self.folder.tensors if name not in names]
        if drop_mtp:
            names -= {name for name in names if name.startswith("mtp.")}
        if self.model.tied and "lm_head.weight" in names:
            names.remove("lm_head.weight")
            self._check_tied()
        tensors = {name: self.folder.tensors[name] for name in names}
        jobs.check_same({name: info.shape for name, info in tensors.items()}, self.table.hf, str(path))
        for name, info in tensors.items():
            if info.dtype not in FLOATS:
                raise ValueError(
                    f"{path / info.file}: {name} is {info.dtype}, but weights must be {', '.join(FLOATS)}; "
                    "use a checkpoint that is not quantized."
                )
        self.kept = self.outside + zero_centred_names(self.table)
        self.planned = {key: Planned(shape, self._dtype(key)) for key, shape in self.table.megatron.items()}

    def _dtype(self, key: str) -> torch.dtype:
        """The narrowest dtype that holds all parts, and at least what Megatron holds it in."""
        dtypes = [FLOATS[self.folder.tensors[part.name].dtype] for part in self.table.to_megatron[key].parts]
        dtype = torch.float32 if key.endswith(FLOAT32_KEYS) else dtypes[0]
        for each in dtypes:
            dtype = torch.promote_types(dtype, each)
        return dtype

    def _check_tied(self) -> None:
        """Refuse an output layer that is stored although it is tied, and is not the embedding."""
        names = ("lm_head.weight", f"{self.dialect.prefix}embed_tokens.weight")
        infos = [self.folder.tensors[name] for name in names]
        same = infos[0][:2] == infos[1][:2]
        if same:
            with self.folder.open() as reader:
                pairs = zip(*map(reader.pieces, names), strict=True)
                same = all(torch.equal(*(x.contiguous().view(torch.uint8) for x in pair)) for pair in pairs)
        if not same:
            raise ValueError(
                f"{self.folder.path}: config.json ties the embedding and the output layer, but "
                f"{' and '.join(names)} differ; set tie_word_embeddings to false."
            )

    @contextmanager
    def rows(self, advance: Callable[[int], None]) -> Iterator[Callable[[Rows], Tensor]]:
        """A function that gives rows of Megatron's tensors, for one thread."""
        with self.folder.open() as reader:

            def read(cut: Rows) -> Tensor:
                shape, dtype = self.planned[cut.name]
                out = jobs.gather(self.table.to_megatron[cut.name], cut, shape, dtype, reader.rows)
                if cut.name.endswith(ZERO_CENTRED):
                    out = out - 1
                advance(out.nbytes)
                return out

            yield read


def convert(source_path: Path, target: Path, workers: int, drop_mtp: bool = False) -> str:
    """Convert a Hugging Face checkpoint into one that `pretrain_qwen35.py --load` takes.

    Args:
        source_path: folder with config.json and safetensors.
        target: folder to make.
        workers: files written at once.
        drop_mtp: leave multi-token prediction out.

    Returns:
        What was done, in a line.

    Raises:
        ValueError: the source cannot be converted; nothing has been written.
    """
    source = Source(source_path, drop_mtp)
    parts = {part: {key: source.planned[key] for key in keys} for part, keys in source.table.layers.items()}
    sizes = {
        part: sum(prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
        for part, tensors in parts.items()
    }
    kept = {name: source.folder.tensors[name] for name in source.kept}
    kept_bytes = sum(info.num_bytes for info in kept.values())
    memory = {
        part: _COPIES * max(piece_bytes(*tensor) for tensor in tensors.values())
        for part, tensors in parts.items()
    }
    jobs.check_space(target, sum(sizes.values()) + kept_bytes)
    job = {"to": "megatron", "drop_mtp": drop_mtp, "source": jobs.fingerprint([source_path])}
    folder = PartialFolder(target, job)
    try:
        (folder.path / RELEASE).mkdir(exist_ok=True)
        (folder.path / jobs.KEPT).mkdir(exist_ok=True)
        planner = Writer(folder.path / RELEASE, parts, _objects(source), source.rows)
        part_of = {f"{RELEASE}/{planner.file(part)}": part for part in parts}
        kept_file = f"{jobs.KEPT}/{jobs.KEPT_TENSORS}"

        def write(file: str, advance: Callable[[int], None]) -> str:
            if file == kept_file:
                _copy_tensors(source.folder, kept, folder.path / file, advance)
                return ""
            return planner.write(part_of[file], advance)

        files = {file: sizes[part] for file, part in part_of.items()} | {kept_file: kept_bytes}
        needs = {file: memory[part] for file, part in part_of.items()}
        needs[kept_file] = _COPIES * min(PIECE_BYTES, kept_bytes)
        budget = jobs.memory_budget(source.folder.tensors.values())
        notes = jobs.run(folder, files, write, workers, needs, budget)
        planner.finish(notes[: len(part_of)])
        _keep(source, folder.path / jobs.KEPT, drop_mtp)
        with open(folder.path / TRACKER, "w", encoding="utf-8") as tracker:
            tracker.write(RELEASE)
            sync(tracker)
        folder.publish()
    finally:
        folder.close()
    return (
        f"wrote {target}: {len(source.planned)} tensors, {sum(sizes.values()):,} bytes; "
        f"{len(source.outside)} tensors outside the language model kept in {jobs.KEPT}/"
    )


def _objects(source: Source) -> dict[str, object]:
    """What the checkpoint holds beside tensors: states without content, and the arguments of the model."""
    arguments = Namespace(
        **model_arguments(source.model),
        padded_vocab_size=source.padded_vocab_size,
        mtp_num_layers=source.dialect.mtp_layers or None,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
    )
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0}
    return {"common_state/shard_0_1": common} | dict.fromkeys(source.table.objects)


def _copy_tensors(
    folder: Folder, tensors: dict[str, Info], path: Path, advance: Callable[[int], None]
) -> None:
    with folder.open() as reader:

        def pieces(name: str) -> Iterator[Tensor]:
            for piece in reader.pieces(name):
                advance(piece.nbytes)
                yield piece

        write_file(path, tensors, pieces)


def _keep(source: Source, path: Path, drop_mtp: bool) -> None:
    """Keep what the way back needs beside the weights."""
    for file in source.folder.files:
        shutil.copyfile(source.folder.path / file, path / file)
    tensors = source.folder.tensors.items()
    kept = {name: list(info) for name, info in tensors if not (drop_mtp and name.startswith("mtp."))}
    write_json(path / jobs.LAYOUT, {"tensors": kept, "kept": source.kept})
