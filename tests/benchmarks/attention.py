"""How fast is one rank's share of attention, beside FlashAttention-2 and beside cuDNN without CP?

python -m tests.benchmarks.attention    on a GPU, from the root of the repository; writes results/attention.md

One process on one GPU does the work of one context-parallel rank, all merges and sums included; what
comes from other ranks is a copy of its own, made on the GPU, so the network is not part of it.

Exit status 1 if a bound is missed or a result differs from FlashAttention-2's.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from tests.benchmarks import runs  # isort: split

import torch
from torch import Tensor

from megatron_gdn import cp_comm
from megatron_gdn.attention_cp import context_parallel_attention
from megatron_gdn.ops import attention, attention_cudnn
from megatron_gdn.stream import StreamPlan

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256
SCALE = HEAD_DIM**-0.5
LOCAL = 32768
"""Tokens of one rank."""
CP = 4
OF_WHOLE = 0.9
"""At least, of the rate without CP on one document: CP on one document."""
PACKED_TFLOPS = 330.0
"""At least, on packed documents."""
SAME = 1e-2


def borders_of(lengths: Iterator[int], seq_len: int) -> tuple[int, ...]:
    """Document borders of a stream filled with documents of these lengths."""
    borders = [0]
    while borders[-1] < seq_len:
        borders.append(min(seq_len, borders[-1] + next(lengths)))
    return tuple(borders)


def repeated(first: int, then: int) -> Iterator[int]:
    yield first
    while True:
        yield then


def log_uniform(low: int, high: int) -> Iterator[int]:
    source = random.Random(1)
    while True:
        yield int(low * (high / low) ** source.random())


DOCUMENTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "one document": lambda length: (0, length),
    "documents of 8,192": lambda length: borders_of(repeated(5000, 8192), length),
    "documents of 4,096": lambda length: borders_of(repeated(3000, 4096), length),
    "documents of 1,024": lambda length: borders_of(repeated(600, 1024), length),
    "documents of 256": lambda length: borders_of(repeated(100, 256), length),
    "256 to 32,768, log-uniform": lambda length: borders_of(log_uniform(256, 32768), length),
    "one of 100,000, then of 1,000": lambda length: borders_of(repeated(100_000, 1000), length),
}
"""Borders of a stream of so many tokens, by name. None is on a span's border."""


@dataclass(frozen=True)
class Case:
    """One rank's share of a stream."""

    documents: str
    cp_size: int = CP
    cp_rank: int = 1
    exchange: str = "p2p"

    def plan(self, local: int) -> StreamPlan:
        """The stream, `local` tokens of it on this rank."""
        length = local * self.cp_size
        borders = DOCUMENTS[self.documents](length)
        return StreamPlan("zigzag", self.cp_size, self.cp_rank, length, 1, borders, runs.DEVICE)

    def __str__(self) -> str:
        share = f"CP {self.cp_size} rank {self.cp_rank}, {self.exchange}" if self.cp_size > 1 else "CP 1"
        return f"{share}: {self.documents}"


CASES = [
    Case("one document", 1, 0),
    *(Case("one document", CP, rank, exchange) for exchange in ("p2p", "all_gather") for rank in (0, 3)),
    *(Case(documents) for documents in list(DOCUMENTS)[1:]),
    *(Case(documents, 1, 0) for documents in list(DOCUMENTS)[1:-1]),
    *(Case(documents, exchange="all_gather") for documents in list(DOCUMENTS)[1:]),
]


class Arrived:
    """Stands for what other ranks send: random numbers, there at once."""

    def __init__(self, x: Tensor, group, send_splits: list[int], recv_splits: list[int]):
        self.out = torch.randn(sum(recv_splits), *x.shape[1:], dtype=x.dtype, device=x.device)

    def wait(self) -> Tensor:
        """A copy, since what arrives is the receiver's to write to."""
        return self.out.clone()


@contextmanager
def no_network() -> Iterator[None]:
    """Exchanges that bring the same numbers every time."""
    arrived = {}

    def start(x, group, send_splits, recv_splits):
        key = x.dtype, tuple(send_splits), tuple(recv_splits)
        if key not in arrived:
            arrived[key] = Arrived(x, group, send_splits, recv_splits)
        return arrived[key]

    with mock.patch.object(cp_comm, "start_all_to_all", start):
        yield


def attend(case: Case, plan: StreamPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[s, 1, H, D], as the layer calls it."""
    if case.cp_size > 1:
        return context_parallel_attention(q, k, v, plan, SCALE, None, case.exchange)
    rows = (x.transpose(0, 1) for x in (q, k, v))
    return attention.attention(*rows, SCALE, plan.stream_rows).transpose(0, 1)


@dataclass(frozen=True)
class Measured:
    """Of one case and one set of kernels."""

    forward: float
    """ms."""
    both: float
    """Forward and backward, ms."""
    rate: float
    """TFLOP/s, forward and backward."""
    peak: float
    """MiB that the work needs at its fullest, beside its inputs."""
    results: tuple[Tensor, ...]


def measure(case: Case, local: int) -> Measured:
    """Time a case and keep its results."""
    plan = case.plan(local)
    torch.manual_seed(1234)
    shapes = ((local, 1, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    *leaves, do = (torch.randn(shape, device=runs.DEVICE).bfloat16() for shape in shapes)
    leaves = [x.requires_grad_() for x in leaves]

    def both():
        o = attend(case, plan, *leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    results = both()
    peak = runs.peak_gib(both) * 1024
    with torch.no_grad():
        forward_ms = runs.milliseconds(lambda: attend(case, plan, *leaves), warm_up=1)
    both_ms = runs.milliseconds(both, warm_up=1)
    pairs = int((plan.local_positions + 1).sum())
    operations = 14 * pairs * HEADS * HEAD_DIM  # 2 products forward, 5 backward, 2 operations each
    return Measured(forward_ms, both_ms, operations / both_ms / 1e9, peak, results)


def differ(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """Largest relative difference of o, dq, dk, dv."""
    return max(runs.relative_error(*pair) for pair in zip(ours, theirs, strict=True))


HEAD = ["rank's share: documents", "fwd, ms", "fwd+bwd, ms", "TFLOP/s", "FlashAttention-2", "over it"]
HEAD += ["over cuDNN at CP 1", "of matmul", "memory, MiB", "difference"]


def missed_bounds(case: Case, rate: float, whole: float, difference: float) -> list[str]:
    """What a case falls short of, in words; `whole`: the rate of one document without CP."""
    missed = []
    if not difference < SAME:
        missed.append(f"{case}: differs from FlashAttention-2 by {difference:.1e}")
    if case.documents == "one document":
        if rate < OF_WHOLE * whole:
            missed.append(f"{case}: {rate / whole:.2f} of the rate without CP, wanted {OF_WHOLE:g}")
    elif rate < PACKED_TFLOPS:
        missed.append(f"{case}: {rate:.0f} TFLOP/s, wanted {PACKED_TFLOPS:g}")
    return missed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the table."""
    arguments = runs.read_arguments(__doc__, argv)
    local = 128 if arguments.tiny else LOCAL
    ceilings = runs.Ceilings.measure()
    report = runs.LiveReport(
        arguments.results,
        "attention",
        "# One rank's share of attention",
        "",
        f"{local:,} tokens of a rank, zigzag; {HEADS} query and {KV_HEADS} key/value heads of {HEAD_DIM}, "
        "bf16; medians. Operations are those of the pairs of tokens that see each other, 7 products per pair "
        "forward and backward. FlashAttention-2: the same blocks with torch's kernel. Memory: the most that "
        "forward and backward hold beside their inputs. Difference: relative, of o, dq, dk and dv, whichever "
        f"is largest. Bounds: with CP on one document {OF_WHOLE:.0%} of the rate without; on packed "
        f"documents {PACKED_TFLOPS:g} TFLOP/s.",
        "",
        ceilings.text(),
    )
    report.table("By documents", HEAD)
    missed, whole = [], None
    with no_network():
        for case in CASES:
            ours = measure(case, local)
            with mock.patch.object(attention_cudnn, "takes", lambda *kind: False):
                theirs = measure(case, local)
            whole = whole or ours.rate
            difference = differ(ours.results, theirs.results)
            missed += missed_bounds(case, ours.rate, whole, difference)
            report.row(
                case,
                f"{ours.forward:.2f}",
                f"{ours.both:.2f}",
                f"{ours.rate:.0f}",
                f"{theirs.rate:.0f}",
                f"{ours.rate / theirs.rate:.2f}",
                f"{ours.rate / whole:.2f}",
                f"{ours.rate / ceilings.tflops:.2f}",
                f"{ours.peak:,.0f}",
                f"{difference:.0e}",
            )
    return report.verdict(missed)


if __name__ == "__main__":
    sys.exit(main())
