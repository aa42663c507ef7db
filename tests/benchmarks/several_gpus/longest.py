"""The longest stream that 4 layers can train on: tokens are raised until memory does not suffice.

Forward and backward, bf16 weights and gradients, no optimizer state, no vocabulary. Documents are short,
which changes no tensor's size but keeps the time of a step in proportion to the tokens.
"""

import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.benchmarks.several_gpus.cases import SLICE, Scale, Work
from tests.benchmarks.several_gpus.launch import Launcher, OutOfMemory
from tests.benchmarks.several_gpus.layers import free, make_step
from tests.helpers.distributed import make_groups

MODE = "headwise"


class Range(NamedTuple):
    """Tokens per GPU."""

    fits: int
    too_long: int | None
    """None: nothing was too long yet."""


def next_try(known: Range, scale: Scale) -> int | None:
    """Tokens per GPU to try next; None when what fits is known to an eighth, or the limit is reached.

    Multiples of an eighth of the start, so that every layout can cut them.
    """
    grain = scale.search_start // 8
    if known.too_long is None:
        tokens = min(max(2 * known.fits, scale.search_start), scale.search_limit)
        return tokens if tokens > known.fits else None
    tokens = (known.fits + known.too_long) // 2 // grain * grain
    small_enough = known.too_long - known.fits <= max(known.fits // 8, grain)
    return None if small_enough or tokens <= known.fits else tokens


def search(launcher: Launcher, scale: Scale, gpus: int, recompute: bool, folder: Path) -> Range:
    """What fits and what does not, as far as the time given in `scale` reaches."""
    known, log = Range(0, None), folder / "fits.txt"
    deadline = time.time() + scale.search_seconds
    while next_try(known, scale) is not None and time.time() < deadline:
        log.write_text("")
        try:
            launcher.run(_search_rank, gpus, scale, known, recompute, deadline, log)
            done = True
        except OutOfMemory:
            done = False
        known = Range(_last(log, known.fits), known.too_long)
        if done:
            break
        known = Range(known.fits, next_try(known, scale))
    return known


def _last(log: Path, otherwise: int) -> int:
    lines = log.read_text().split()
    return int(lines[-1]) if lines else otherwise


def _search_rank(
    rank: int, world_size: int, scale: Scale, known: Range, recompute: bool, deadline: float, log: Path
) -> None:
    """Body of one rank: tries until one is too long, which ends the process; a line in `log` for each."""
    with make_groups(cp=world_size) as groups:
        while (trial := next_try(known, scale)) is not None and _together(time.time() < deadline):
            free()
            options = {"document": scale.document, "recompute": recompute}
            step = make_step(Work(SLICE, MODE), scale.size, groups, trial * world_size, **options)
            step()
            step()  # with the first one's gradients in memory from its start, as in training
            torch.cuda.synchronize()
            del step
            dist.barrier()
            known = Range(trial, known.too_long)
            if rank == 0:
                with log.open("a") as file:
                    file.write(f"{trial}\n")


def _together(wanted: bool) -> bool:
    """Whether every rank wants to."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    votes = torch.tensor(int(wanted), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes)
