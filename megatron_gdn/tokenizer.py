"""Text to token ids: bytes without any download, or a Hugging Face tokenizer folder.

Both are what the host asks of `GPTDatasetConfig.tokenizer`. The host pads the last sample of a split
with `pad` and takes every such label out of the loss, so `pad` is -1 here: a number that no document
can hold, whatever pad token a folder names (often the end-of-document token itself).
"""

import os
from abc import ABC, abstractmethod
from collections import OrderedDict

import numpy as np


class Tokenizer(ABC):
    """What data preparation and the host's datasets need of a tokenizer.

    Not a subclass of the host's `MegatronTokenizerBase`: the host never asks for the type, and preparing
    data should not wait for torch to be imported.

    Args:
        path: where it came from, for the names of cached indices.
        vocab_size: every id lies in [0, vocab_size).
        eod: id that closes every document.
    """

    pad = -1
    """Stands in no document; the host turns it to 0 before the embedding."""

    def __init__(self, path: str, vocab_size: int, eod: int):
        self.path = path
        self.vocab_size = vocab_size
        self.eod = eod

    @property
    def eos(self) -> int:
        """The host's second name for `eod`."""
        return self.eod

    @property
    def unique_identifiers(self) -> OrderedDict:
        """What tells this tokenizer from another; part of the name of the host's cached indices."""
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        return OrderedDict({"class": name, "path": self.path, "vocab_size": self.vocab_size, "eod": self.eod})

    @abstractmethod
    def encode_batch(self, texts: list[str], dtype: type[np.integer]) -> list[np.ndarray]:
        """Token ids of each text, 1-D of `dtype`, without end-of-document ids.

        Raises:
            UnicodeEncodeError: a text holds half of a surrogate pair, which is no character.
        """

    def tokenize(self, text: str) -> list[int]:
        """Token ids of one text, without the end-of-document id."""
        return self.encode_batch([text], np.int32)[0].tolist()

    @abstractmethod
    def detokenize(self, ids: list[int]) -> str:
        """Text of `ids`, without what stands for `eod` and `pad`."""


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are the bytes of the UTF-8 text, 256 closes a document."""

    def __init__(self):
        super().__init__("byte", vocab_size=257, eod=256)

    def encode_batch(self, texts: list[str], dtype: type[np.integer]) -> list[np.ndarray]:
        """See `Tokenizer.encode_batch`."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(dtype) for text in texts]

    def detokenize(self, ids: list[int]) -> str:
        """See `Tokenizer.detokenize`; a cut character becomes U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class FolderTokenizer(Tokenizer):
    """A Hugging Face tokenizer read from a local folder; its end-of-sequence token closes a document.

    Nothing is added around a text. A special token spelled out in a text becomes that token's id, as in
    the host's own tools.

    Args:
        folder: holds tokenizer.json (or another vocabulary file) and tokenizer_config.json.

    Raises:
        ValueError: the folder is missing, holds no tokenizer, or the tokenizer has no end token.
    """

    def __init__(self, folder: str):
        self._tokenizer = _load(folder)
        eod = self._tokenizer.eos_token_id
        if eod is None:
            raise ValueError(
                f'--tokenizer {folder!r} has no eos_token to close documents with; add "eos_token" to '
                "its tokenizer_config.json."
            )
        super().__init__(
            os.path.abspath(folder), vocab_size=max(self._tokenizer.get_vocab().values()) + 1, eod=eod
        )

    def encode_batch(self, texts: list[str], dtype: type[np.integer]) -> list[np.ndarray]:
        """See `Tokenizer.encode_batch`."""
        for text in texts:
            text.encode("utf-8")  # a fast tokenizer answers half a surrogate pair with a bare TypeError
        rows = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(row, dtype=dtype) for row in rows]

    def detokenize(self, ids: list[int]) -> str:
        """See `Tokenizer.detokenize`."""
        return self._tokenizer.decode([i for i in ids if i not in (self.eod, self.pad)])


def build_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `--tokenizer` names.

    Args:
        name: "byte", or a Hugging Face tokenizer folder. No network is used.

    Raises:
        ValueError: see `FolderTokenizer`; or the package `transformers` is missing.
    """
    return ByteTokenizer() if name == "byte" else FolderTokenizer(name)


def _load(folder: str):
    """The transformers tokenizer in `folder`, known to turn text into ids."""
    way_out = (
        "pass 'byte', or a folder made by a Hugging Face tokenizer's save_pretrained "
        "(tokenizer.json, tokenizer_config.json)."
    )
    if not os.path.isdir(folder):
        what = "is a file" if os.path.exists(folder) else "does not exist"
        raise ValueError(f"--tokenizer {folder!r} {what}; {way_out}")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"--tokenizer {folder!r} needs the package transformers ({error}); "
            "pip install transformers, or pass 'byte'."
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # A model folder without vocabulary files gives a tokenizer that turns every text into nothing.
        works = bool(tokenizer("plain text", add_special_tokens=False)["input_ids"])
    except Exception as error:  # noqa: BLE001  (the Rust core raises bare Exception for a broken file)
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"--tokenizer {folder!r} cannot be read ({reason}); {way_out}") from None
    if not works:
        found = ", ".join(sorted(os.listdir(folder))[:6]) or "nothing"
        raise ValueError(f"--tokenizer {folder!r} has no vocabulary (it holds {found}); {way_out}")
    return tokenizer
