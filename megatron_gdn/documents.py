"""From paths to token ids: find the files, cut them into blocks, encode the blocks on several processes.

A file that ends in .jsonl or .json holds one JSON object per line, each line a document; every other file
is one document. The order is that of the inputs, and the blocks are cut the same way for any number of
workers, so what comes out does not depend on it.
"""

import json
import multiprocessing
import os
import signal
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_gdn.tokenizer import Tokenizer

JSON_LINES = (".jsonl", ".json")
FOLDER_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
BLOCK_BYTES = 1 << 20
"""Input bytes handed to a worker at a time (one line or file may be longer)."""
MAX_DOCUMENT_TOKENS = 2**31 - 1
"""The host's index holds sequence lengths as int32."""
UTF8_BOM = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """A line of a JSON-lines file, or a whole file that the worker reads."""

    path: str
    line: int
    """From 1; 0 for a whole file."""
    raw: bytes
    """The line; empty for a whole file."""


@dataclass
class Block:
    """What a worker gets: neighbouring pieces and the input bytes they stand for."""

    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0


@dataclass
class Encoded:
    """What a worker gives back for a block."""

    documents: list[np.ndarray] = field(default_factory=list)
    """Token ids of each document, 1-D, closed by the end-of-document id."""
    bad: list[str] = field(default_factory=list)
    """FILE:LINE: what is wrong."""
    num_empty: int = 0
    num_bytes: int = 0


class BadText(ValueError):
    """A document that cannot be taken; `line` (from 1) says where in a whole file."""

    def __init__(self, reason: str, line: int = 1):
        super().__init__(reason)
        self.line = line


def find_files(
    inputs: Iterable[str], suffixes: Iterable[str], exclude: Iterable[str]
) -> list[tuple[str, int]]:
    """(path, bytes) of every input file, in the order the documents will stand.

    Args:
        inputs: files, taken whatever their name, and folders, walked to the bottom (links to folders
            are not followed) and sorted by path.
        suffixes: what a folder's file must end in, upper or lower case.
        exclude: names of folders to leave out wherever they stand below an input.

    Raises:
        ValueError: an input is missing, unreadable, no regular file, or a folder without such files.
    """
    suffixes = tuple(s.lower() for s in suffixes)
    for suffix in suffixes:
        if not suffix.startswith("."):
            raise ValueError(f"--suffix needs a leading dot, got {suffix!r}; write .{suffix}.")
    files = []
    for path in inputs:
        if not os.path.isdir(path):
            files.append(path)
            continue
        found = sorted(p for p in _walk(path, set(exclude)) if p.lower().endswith(suffixes))
        if not found:
            raise ValueError(
                f"--input {path} holds no file that ends in {' '.join(suffixes)}; name others with --suffix."
            )
        files.extend(found)
    return [(path, _readable_size(path)) for path in files]


def _walk(folder: str, exclude: set[str]) -> Iterator[str]:
    """Paths of all files below `folder`; a subfolder that cannot be read raises OSError."""

    def stop(error: OSError):
        raise error

    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if name not in exclude]
        yield from (os.path.join(root, name) for name in names)


def _readable_size(path: str) -> int:
    """Bytes of a regular file that may be read."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"--input {path} is no regular file; write its content to a file first.")
        open(path, "rb").close()
    except OSError as error:
        raise ValueError(
            f"--input {path} cannot be read ({error.strerror}); mend that, or leave it out of --input."
        ) from None
    return status.st_size


def blocks(files: Iterable[tuple[str, int]]) -> Iterator[Block]:
    """The files of `find_files` in blocks of about `BLOCK_BYTES`; JSON lines are streamed."""
    block = Block()
    for piece, num_bytes in _pieces(files):
        if block.pieces and block.num_bytes + num_bytes > BLOCK_BYTES:
            yield block
            block = Block()
        block.pieces.append(piece)
        block.num_bytes += num_bytes
    if block.pieces:
        yield block


def _pieces(files: Iterable[tuple[str, int]]) -> Iterator[tuple[Piece, int]]:
    """Every document-to-be with the input bytes it stands for."""
    for path, size in files:
        if not path.lower().endswith(JSON_LINES):
            yield Piece(path, 0, b""), size
            continue
        with open(path, "rb") as stream:
            for number, line in enumerate(stream, 1):
                yield Piece(path, number, line), len(line)


class Encoder:
    """Turns a block into token ids; runs in the workers.

    Args:
        tokenizer: text to ids.
        dtype: numpy type of the ids.
        text_field: field of a JSON line that holds the document.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: type[np.integer], text_field: str):
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.text_field = text_field

    def __call__(self, block: Block) -> Encoded:
        """Encode every document of `block`, in order; what is bad or empty is left out and told."""
        result = Encoded(num_bytes=block.num_bytes)
        texts, places = [], []
        for path, line, raw in block.pieces:
            try:
                text = json_text(raw, line, self.text_field) if line else file_text(path)
            except BadText as error:
                result.bad.append(f"{path}:{line or error.line}: {error}")
                continue
            if text:
                texts.append(text)
                places.append(f"{path}:{line or 1}")
            elif text is not None:
                result.num_empty += 1
        rows = self.tokenizer.encode_batch(texts, self.dtype) if texts else []
        for place, ids in zip(places, rows, strict=True):
            if len(ids) >= MAX_DOCUMENT_TOKENS:
                result.bad.append(f"{place}: {len(ids):,} tokens are too many for one document")
            elif len(ids):
                result.documents.append(np.append(ids, self.dtype(self.tokenizer.eod)))
            else:
                result.num_empty += 1
        return result


def json_text(raw: bytes, line: int, name: str) -> str | None:
    """The document in one JSON line; None for a blank line.

    Args:
        raw: the line with its end.
        line: its number, from 1.
        name: the field that holds the document.

    Raises:
        BadText: what is wrong with the line.
    """
    raw = raw.removeprefix(UTF8_BOM) if line == 1 else raw
    if not raw.strip():
        return None
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadText(f"invalid UTF-8 at byte {error.start + 1} of the line") from None
    except RecursionError:
        raise BadText("invalid JSON: nested too deeply") from None
    except ValueError as error:
        raise BadText(f"invalid JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadText(f"a JSON object is needed, got {type(record).__name__}")
    if name not in record:
        raise BadText(f"no field {name!r} (--text-field); it has {', '.join(list(record)[:6]) or 'none'}")
    text = record[name]
    if not isinstance(text, str):
        raise BadText(f"field {name!r} must be a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadText(f"field {name!r} holds half of a surrogate pair, which is no character") from None
    return text


def file_text(path: str) -> str:
    """A whole file, as it stands but for a byte order mark.

    Raises:
        BadText: the file is not UTF-8.
    """
    with open(path, "rb") as stream:
        raw = stream.read().removeprefix(UTF8_BOM)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadText("invalid UTF-8", raw.count(b"\n", 0, error.start) + 1) from None


def encode_blocks(encoder: Encoder, todo: Iterable[Block], workers: int) -> Iterator[Encoded]:
    """`encoder` over all blocks, in order, on `workers` processes; few blocks are in memory at a time.

    Raises:
        ValueError: a worker was killed.
        OSError: a file vanished since it was found.
    """
    if workers == 1:
        yield from map(encoder, todo)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker, (encoder,))
    waiting = deque()
    try:
        for block in todo:
            waiting.append(pool.submit(_encode, block))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError(
            "a worker process was killed, most often for want of memory; lower --workers."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    """Keep the encoder, leave Ctrl-C to the parent, and end when the parent is gone."""
    global _worker_encoder
    _worker_encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _encode(block: Block) -> Encoded:
    """The worker's encoder over one block."""
    return _worker_encoder(block)
