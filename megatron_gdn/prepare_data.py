"""Turn text files, JSON lines or folders of them into the host's indexed dataset (P.bin, P.idx).

Each document becomes one sequence, closed by the tokenizer's end-of-document id; `documents.py` says what a
document is. Empty documents are left out, and counted.
"""

import argparse
import os
import struct
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from megatron_gdn.documents import (
    BLOCK_BYTES,
    FOLDER_SUFFIXES,
    Encoded,
    Encoder,
    blocks,
    encode_blocks,
    find_files,
)
from megatron_gdn.tokenizer import build_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `prepare-data`."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="text, JSON lines (.jsonl, .json), folders")
    add("--output-prefix", required=True, metavar="P", help="writes P.bin and P.idx")
    add("--tokenizer", required=True, metavar="byte|FOLDER", help="bytes, or a Hugging Face tokenizer folder")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="default: all cores")
    add("--text-field", default="text", metavar="NAME", help="JSON field of the document (default: text)")
    add("--on-error", choices=("stop", "skip"), default="stop", help="at a bad line or file (default: stop)")
    suffixes = " ".join(FOLDER_SUFFIXES)
    add(
        "--suffix",
        nargs="+",
        default=FOLDER_SUFFIXES,
        metavar=".EXT",
        help=f"which files of a folder (default: {suffixes})",
    )
    add("--exclude", nargs="+", default=(), metavar="NAME", help="names of folders to leave out")


@dataclass
class Totals:
    """What a job did, in documents and tokens (end-of-document ids counted)."""

    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    empty: int = 0


def main(args: argparse.Namespace) -> int:
    """Run `prepare-data`.

    Raises:
        ValueError: a flag or an input that cannot be used, or a bad line under --on-error stop. Nothing
            that looks finished is left behind.
    """
    start = time.monotonic()
    if args.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {args.workers}.")
    _check_output(args.output_prefix)
    files = find_files(args.input, args.suffix, args.exclude)
    tokenizer = build_tokenizer(args.tokenizer)
    dtype = _host().DType.optimal_dtype(tokenizer.vocab_size)
    num_bytes = sum(size for _, size in files)
    encoder = Encoder(tokenizer, dtype, args.text_field)
    tqdm.monitor_interval = 0  # no thread of its own: the workers are forked after the bar is made
    with (
        closing(encode_blocks(encoder, blocks(files), args.workers)) as encoded,
        tqdm(total=num_bytes, unit="B", unit_scale=True, disable=None, desc="prepare-data") as progress,
    ):
        totals = write_dataset(args.output_prefix, dtype, encoded, progress, skip=args.on_error == "skip")
    print(
        f"wrote {args.output_prefix}.bin and .idx: {totals.documents:,} documents, {totals.tokens:,} tokens "
        f"({dtype.__name__}), {totals.skipped:,} skipped as bad, {totals.empty:,} empty left out, "
        f"{num_bytes:,} bytes read, {time.monotonic() - start:.1f} s"
    )
    return 0


def write_dataset(
    prefix: str, dtype: type[np.integer], encoded: Iterable[Encoded], progress: tqdm, skip: bool
) -> Totals:
    """Write P.bin and P.idx; both appear at the end or not at all.

    Args:
        prefix: P, a path without ending; its folder is made.
        dtype: numpy type of the ids.
        encoded: the blocks, in order.
        progress: moved on by the input bytes of each block.
        skip: report a bad line and go on, instead of stopping.

    Raises:
        ValueError: a bad line without `skip`, or no document at all.
    """
    totals = Totals()
    with _both_or_neither(prefix) as (bin_path, idx_path):
        builder = _host().IndexedDatasetBuilder(bin_path, dtype)
        with builder.data_file:
            for block in encoded:
                for problem in block.bad:
                    if not skip:
                        raise ValueError(f"{problem}; mend it, or leave such lines out with --on-error skip.")
                    progress.write(f"skipped {problem}", file=sys.stderr)
                for ids in block.documents:
                    builder.add_document(ids, [len(ids)])
                    totals.tokens += len(ids)
                totals.documents += len(block.documents)
                totals.skipped += len(block.bad)
                totals.empty += block.num_empty
                progress.update(block.num_bytes)
            if not totals.documents:
                raise ValueError(
                    f"--input holds no document ({totals.empty:,} empty, {totals.skipped:,} bad); "
                    "give files with text."
                )
            builder.finalize(idx_path)
    return totals


def _check_output(prefix: str) -> None:
    """Refuse a prefix that names no file, or whose files exist."""
    if not os.path.basename(prefix):
        raise ValueError(f"--output-prefix {prefix!r} names a folder; add a name, as in {prefix}corpus.")
    for path in (f"{prefix}.bin", f"{prefix}.idx"):
        if os.path.exists(path):
            raise ValueError(f"{path} exists; remove it, or choose another --output-prefix.")


@contextmanager
def _both_or_neither(prefix: str) -> Iterator[tuple[str, str]]:
    """Temporary paths for .bin and .idx, which get their names when the body succeeds."""
    try:
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output-prefix {prefix}: its folder cannot be made ({error.strerror}); choose another."
        ) from None
    endings = (".bin", ".idx")
    temporary = tuple(f"{prefix}{ending}.tmp-{os.getpid()}" for ending in endings)
    try:
        yield temporary
        for path, ending in zip(temporary, endings, strict=True):
            os.replace(path, prefix + ending)
    finally:
        for path in temporary:
            with suppress(FileNotFoundError):
                os.unlink(path)


def check_dataset(prefix: str, vocab_size: int) -> int | None:
    """Refuse a dataset that training could not read; costs the same whatever its size.

    Prefixes in object storage are left to the host.

    Args:
        prefix: what --data-path names, without .bin and .idx.
        vocab_size: ids must lie below it; looked up in a few documents, first and last among them.

    Returns:
        Number of documents; None for a prefix that was left to the host.

    Raises:
        ValueError: a file is missing, unreadable, cut, of another kind, or holds ids that are too large.
    """
    host = _host()
    if host.is_object_storage_path(prefix):
        return None
    again = "run prepare-data again, or copy both files again."
    try:
        itemsize, num_sequences, bin_needed = _read_index(host, prefix)
        bin_size = os.path.getsize(f"{prefix}.bin")
    except OSError as error:
        raise ValueError(
            f"--data-path {prefix}: {error.filename} cannot be read ({error.strerror}); give the path "
            "without .bin and .idx, as in prepare-data --output-prefix."
        ) from None
    except _BadIndex as error:
        raise ValueError(f"--data-path {prefix}: {prefix}.idx {error}; {again}") from None
    if bin_size != bin_needed:
        raise ValueError(
            f"--data-path {prefix}: {prefix}.bin has {bin_size:,} bytes but {prefix}.idx tells of "
            f"{bin_needed:,}: it is cut, or the two do not belong together; {again}"
        )
    dataset = host.IndexedDataset(prefix)
    for number in np.unique(np.linspace(0, num_sequences - 1, 16, dtype=np.int64)):
        length = min(int(dataset.sequence_lengths[number]), BLOCK_BYTES // itemsize)
        ids = dataset.get(number, length=length)
        if length and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(
                f"--data-path {prefix}: document {number} holds token ids {ids.min()} to {ids.max()}, but "
                f"the vocabulary has {vocab_size}; pass the --tokenizer that the data was prepared with."
            )
    return num_sequences


class _BadIndex(ValueError):
    """What is wrong with an .idx file."""


def _read_index(host, prefix: str) -> tuple[int, int, int]:
    """(bytes per token, sequences, bytes the .bin must have), from the head and last entries of the .idx.

    Source of the format: megatron-core 0.19.2, core/datasets/indexed_dataset.py, `_IndexWriter`.
    """
    head = struct.Struct("<9sQBQQ")
    size = os.path.getsize(f"{prefix}.idx")
    with open(f"{prefix}.idx", "rb") as stream:
        start = stream.read(head.size)
        if len(start) < head.size:
            raise _BadIndex(f"is cut: it has {size} bytes, its head alone needs {head.size}")
        magic, version, code, sequences, borders = head.unpack(start)
        if magic != host._INDEX_HEADER or version != 1:
            raise _BadIndex("is no index of megatron-core's indexed dataset, version 1")
        if code not in (kind.value for kind in host.DType):
            raise _BadIndex(f"has the unknown number type {code}")
        needed = head.size + sequences * (4 + 8) + borders * 8
        if size != needed:
            raise _BadIndex(f"has {size:,} bytes but its {sequences:,} sequences need {needed:,}")
        if not sequences:
            raise _BadIndex("holds no sequence")

        def last(kind: str, end: int) -> int:
            stream.seek(end - struct.calcsize(kind))
            return struct.unpack(kind, stream.read(struct.calcsize(kind)))[0]

        lengths_end = head.size + sequences * 4
        length, pointer = last("<i", lengths_end), last("<q", lengths_end + sequences * 8)
        if last("<q", size) != sequences:
            raise _BadIndex("ends its last document elsewhere than its last sequence")
    itemsize = host.DType.size(code)
    return itemsize, sequences, pointer + length * itemsize


def _host():
    """The host's module of indexed datasets; it imports torch, hence not at the top."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # remarks on what is not installed for training
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset
