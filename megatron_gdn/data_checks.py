"""Every refusal of data that a user can cause; like `validation`, before the first collective."""

import re
from collections.abc import Callable
from itertools import pairwise


def check_data(
    prefixes: list[str], check: Callable[[str, int], int | None], vocab_size: int, split: str | None
) -> None:
    """Refuse missing or damaged data sets, and those too small to split.

    Args:
        prefixes: every path prefix that the data flags name.
        check: refuses one prefix, given the vocabulary size; returns its documents, None if unknown.
        vocab_size: token ids lie in [0, vocab_size).
        split: shares for training, validation and test, as --split says; None if each has its own data.

    Raises:
        ValueError: no prefix at all, what `check` raises, or a share that comes to no document.
    """
    if not prefixes:
        raise ValueError(
            "--data-path is missing: name a prefix made by `python -m megatron_gdn prepare-data` "
            "(or use --mock-data)."
        )
    for prefix in prefixes:
        documents = check(prefix, vocab_size)
        if split is not None and documents is not None:
            _check_split(split, prefix, documents)


def _check_split(split: str, prefix: str, documents: int) -> None:
    """The host loops for ever over a share of no documents; it rounds shares of the documents so."""
    shares = _shares(split)
    bounds = [round(sum(shares[:i]) / sum(shares) * documents) for i in range(len(shares) + 1)]
    for share, (start, end) in zip(shares, pairwise(bounds), strict=True):
        if share and start == end:
            raise ValueError(
                f"--split {split}: the share {share:g} comes to none of the {documents} documents of "
                f"--data-path {prefix}; use a larger share, 0 for none, or more documents."
            )


def _shares(split: str) -> list[float]:
    """Shares for training, validation and test."""
    shares = [float(share) for share in re.findall(r"[.0-9]+", split)]
    if not 1 <= len(shares) <= 3 or not sum(shares):
        raise ValueError(
            f"--split {split!r} must be up to three numbers, as in 98,2,0: training, validation, test."
        )
    return shares + [0.0] * (3 - len(shares))


def check_evaluation(split: str | None, eval_iters: int, num_datasets: int) -> None:
    """Refuse evaluation without data, and shares of a blend that the host cannot leave unused.

    Args:
        split: as --split says; None if training, validation and test each have their own data.
        eval_iters: as --eval-iters says.
        num_datasets: data sets that are blended.

    Raises:
        ValueError: see the messages.
    """
    if split is None:
        return
    _, validation, test = _shares(split)
    if eval_iters and not validation:
        raise ValueError(
            f"--eval-iters {eval_iters}, but --split {split} leaves nothing to evaluate on; use --eval-iters "
            "0, or give the second share something."
        )
    if not eval_iters and num_datasets > 1 and (validation or test):
        raise ValueError(
            f"--eval-iters 0 with {num_datasets} data sets in --data-path needs --split 1,0,0, got {split}: "
            "the host takes samples from every share of a blend."
        )


def check_vocabulary(tokenizer: str, needed: int, vocab_size: int) -> None:
    """Refuse a tokenizer with more ids than the model has embeddings.

    Raises:
        ValueError: see the message.
    """
    if needed > vocab_size:
        raise ValueError(
            f"--tokenizer {tokenizer} has {needed} token ids but the model's --vocab-size is {vocab_size}; "
            f"pass --vocab-size {needed}, or another tokenizer."
        )
