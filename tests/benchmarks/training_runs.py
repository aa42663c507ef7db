"""Training runs that benchmarks compare: `pretrain_qwen35.py` as a user runs it, on gloo and CPU.

Ranks are forked from this process, which has imported everything once.
"""

import argparse
import functools
import hashlib
import itertools
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from megatron_gdn.training_log import LOG_NAME, read_log
from tests.helpers.distributed import run_ranks
from tests.helpers.pretrain import train_rank as run_script
from tests.helpers.pretrain import words

FLAGS = {
    "qwen35-size": "debug",
    "tokenizer": "byte",
    "split": "100,0,0",
    "seq-length": 256,
    "micro-batch-size": 2,
    "global-batch-size": 4,
    "lr": 1.5e-4,
    "min-lr": 1.5e-5,
    "lr-warmup-iters": 10,
    "weight-decay": 0.1,
    "clip-grad": 1.0,
    "log-interval": 1,
    "eval-iters": 0,
    "eval-interval": 1000,
    "num-workers": 0,
}
STAY = {
    "train-iters": 1,
    "save-interval": 1,
    "lr": 0,
    "min-lr": 0,
    "lr-warmup-iters": 0,
    "lr-decay-iters": 1,
    "weight-decay": 0,
}
"""A run that saves the weights it started from."""
TIMEOUT = 900
"""Seconds for one run."""

PACKED = ["--dataloader-inter-document-masking", "--eod-mask-loss"]
"""Documents are kept apart."""
Edit = Callable[[Iterable[nn.Module]], None]
"""Changes the weights of a model's chunks in place."""


def make_data(folder: Path) -> str:
    """The standard library's own modules as bytes, each piece between blank lines a document; the prefix.

    Whole modules would put a border into one sample of fifty; pieces put some into nearly every one.
    """
    from megatron_gdn import prepare_data

    source = folder / "standard_library.jsonl"
    with source.open("w") as out:
        for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for piece in module.read_text(encoding="utf-8", errors="replace").split("\n\n"):
                if piece.strip():
                    out.write(json.dumps({"text": piece}) + "\n")
    parser = argparse.ArgumentParser()
    prepare_data.add_arguments(parser)
    prefix = str(folder / "standard_library")
    prepare_data.main(
        parser.parse_args(["--input", str(source), "--output-prefix", prefix, "--tokenizer", "byte"])
    )
    return prefix


def lengthen_memory(chunks: Iterable[nn.Module]) -> None:
    """Let GatedDeltaNet's state last for 1 to 1000 tokens, as in a trained model.

    The host's initial `dt_bias` of 1 has it forget within a token or two; next to nothing would have to be
    passed from rank to rank.

    Source of the range: Gu and Dao, "Mamba" (2023): softplus(dt_bias) is 0.001 to 0.1, log-uniform.
    """
    generator = torch.Generator().manual_seed(1)
    for name, parameter in itertools.chain(*(chunk.named_parameters() for chunk in chunks)):
        if name.endswith("dt_bias"):
            step = 10 ** (torch.rand(parameter.shape, generator=generator) * 2 - 3)
            parameter.copy_(step.expm1().log())  # the inverse of softplus


def nudge(chunks: Iterable[nn.Module], coin: int) -> None:
    """Move every number of every parameter to the next one up or down, as the coin falls."""
    generator = torch.Generator().manual_seed(coin)
    for parameter in itertools.chain(*(chunk.parameters() for chunk in chunks)):
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        parameter.copy_(torch.nextafter(parameter, torch.where(up, math.inf, -math.inf).to(parameter)))


def digest(chunks: Iterable[nn.Module]) -> str:
    """SHA-256 of all parameters: names, and every bit."""
    total = hashlib.sha256()
    for name, parameter in itertools.chain(*(chunk.named_parameters() for chunk in chunks)):
        total.update(name.encode())
        total.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def train_rank(
    rank: int, world_size: int, arguments: list[str], folder: Path, edit: Edit | None
) -> str | None:
    """Body of one rank: train, output to a file. Returns the digest of the weights it started from."""
    import pretrain_qwen35

    training = pretrain_qwen35.training
    original = training.load_checkpoint
    digests = [None]

    def load_checkpoint(chunks, *inputs, **options):
        answer = original(chunks, *inputs, **options)
        if edit:
            with torch.no_grad():
                edit(chunks)
        digests.append(digest(chunks))
        return answer

    training.load_checkpoint = load_checkpoint
    run_script(rank, world_size, arguments, folder)
    return digests[-1]


def launch(
    flags: dict,
    switches: list[str],
    cp: int,
    folder: Path,
    *,
    edit: Edit | None = None,
    timeout: float = TIMEOUT,
) -> str | None:
    """Train with `cp` ranks; `flags` win over FLAGS. Returns the digest of the weights it started from.

    Args:
        flags: name to value.
        switches: flags without value.
        cp: ranks.
        folder: made here; what the ranks print goes there.
        edit: changes the weights after they are loaded.
        timeout: seconds.
    """
    folder.mkdir()
    arguments = words(FLAGS | {"context-parallel-size": cp} | flags)
    digests = run_ranks(train_rank, cp, [*arguments, *switches], folder, edit, timeout=timeout)
    if len(set(digests)) > 1:
        raise RuntimeError(f"ranks loaded different weights; see {folder}")
    return digests[0]


def spec(mode: str) -> str:
    """What --spec is given."""
    return f"megatron_gdn.layer_specs get_qwen35_{mode}_cp_spec"


def save_changed(flags: dict, source: Path, to: Path, dtype: str, edit: Edit) -> None:
    """Save the weights of the checkpoint `source` to `to`, as one rank loads them and `edit` changes them.

    The rank takes a single step with learning rate 0; `flags` must name the data and the model.
    """
    folder = to.with_name(f"save-{to.name}")
    switches = ["--no-save-optim", "--no-save-rng", *start_switches(dtype)]
    launch(flags | STAY | {"load": source, "save": to}, switches, 1, folder, edit=edit)


def start_switches(dtype: str) -> list[str]:
    """Take the weights of a checkpoint, and nothing else of it."""
    return ["--finetune", "--exit-on-missing-checkpoint", *(["--bf16"] if dtype == "bf16" else [])]


def save_nudged(flags: dict, source: Path, dtypes: Iterable[str], coins: Iterable[int]) -> None:
    """Save what the noise floor starts from: for each dtype and coin, `source` with other last bits.

    Beside `source`, where `start_of` finds them.
    """
    for dtype, coin in itertools.product(dtypes, coins):
        save_changed(flags, source, start_of(source, dtype, coin), dtype, functools.partial(nudge, coin=coin))


def start_of(source: Path, dtype: str, coin: int) -> Path:
    """The checkpoint that a run loads: `source`, or of the noise floor if the coin is not 0."""
    return source.with_name(f"coin-{coin}-{dtype}") if coin else source


def train(
    flags: dict, switches: list[str], cp: int, folder: Path, timeout: float = TIMEOUT
) -> tuple[list[dict], str, float]:
    """As `launch`; what every iteration logged, the digest, and the seconds."""
    start = time.monotonic()
    digest = launch(flags | {"tensorboard-dir": folder}, switches, cp, folder, timeout=timeout)
    records = read_log(str(folder / LOG_NAME))
    if len(records) != flags["train-iters"]:
        raise RuntimeError(f"logged {len(records)} iterations; see {folder}")
    return records, digest, time.monotonic() - start


def check_digest(name: object, digest: str, reference: str, coin: int) -> None:
    """A run must start from the reference's weights, one of the noise floor from others."""
    if (digest == reference) == bool(coin):
        raise RuntimeError(f"{name}: loaded the wrong weights")
