"""What the benchmarks of layers and of the whole model share: one rank, medians, counts, tables that grow.

Each runs on a GPU, and with --tiny on a CPU too, where its figures mean nothing and its code is tested.
Import this module before any of megatron: where there is no GPU it puts the CPU's stand-ins in place.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_gdn import cpu
from megatron_gdn.config import Qwen35Config
from tests.benchmarks import gpu, report
from tests.helpers.distributed import make_groups

RUNS_ON_CPU = cpu.enable()
SIZE = "35b-a3b"
DEVICE = torch.device("cpu") if RUNS_ON_CPU else torch.device("cuda", 0)
PACKAGES = ("triton", "flash-qla", "tilelang", "fla-core", "nvidia-cudnn-frontend")


def read_arguments(text: str, argv: Sequence[str] | None, tiny: bool = True) -> argparse.Namespace:
    """`tiny`, where a benchmark has it, and `results` of its command line."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if tiny:
        what = "sizes that a CPU can run; figures mean nothing"
        parser.add_argument("--tiny", action="store_true", help=what)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder to write to")
    arguments = parser.parse_args(argv)
    if RUNS_ON_CPU and not (tiny and arguments.tiny):
        parser.error("a GPU is needed" + (" but for --tiny" if tiny else ""))
    return arguments


def model_config(tiny: bool, **overrides) -> Qwen35Config:
    """As `pretrain_qwen35.py` configures the model."""
    return Qwen35Config.from_size(
        "debug" if tiny else SIZE,
        **{
            "params_dtype": torch.bfloat16,
            "bf16": True,
            "transformer_impl": "local",
            "cp_comm_type": "p2p",
            "gradient_accumulation_fusion": False,
        }
        | overrides,
    )


@contextmanager
def one_rank(cp: int = 1, rank: int = 0, seed: int = 1234) -> Iterator[Any]:
    """The host's process groups of one process, and its random states.

    Args:
        cp: context-parallel ranks. With more than one, the others do not exist: collectives of torch's
            "fake" backend have the right shapes, move nothing and leave their results unwritten.
        rank: which of them this process is.
        seed: of every generator.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if cp > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        backend, store = "fake", FakeStore()
    else:
        backend, store = "gloo" if RUNS_ON_CPU else "nccl", torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=cp)
    try:
        with make_groups(cp=cp, create_gloo_process_groups=False) as groups:
            torch.manual_seed(seed)
            model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
            yield groups
    finally:
        torch.distributed.destroy_process_group()


def milliseconds(function: Callable[[], object], repeats: int = 5, warm_up: int = 2) -> float:
    """Median of a few runs by CUDA events; on a CPU, one run by the clock."""
    if not RUNS_ON_CPU:
        return gpu.milliseconds(function, repeats, warm_up)
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def peak_gib(function: Callable[[], object]) -> float:
    """Memory that a run needs beyond what was allocated before it, GiB; NaN on a CPU."""
    if RUNS_ON_CPU:
        return float("nan")
    return gpu.peak_gib(function)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm, in fp32."""
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def saved_gib(forward: Callable[[], object]) -> float:
    """Memory that a forward keeps for its backward, GiB, parameters and leaves left out.

    Every storage counts once and whole, as it stays in memory whole. What a function keeps outside
    `save_for_backward` is not seen.
    """
    seen: dict[int, tuple[int, Any]] = {}

    def pack(tensor):
        if not tensor.is_leaf or not tensor.requires_grad:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes(), storage  # held, so that no address is used twice
        # Nothing is unpacked; an output that is packed with its own graph would live on in a cycle.

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: None):
        forward()
    return sum(size for size, _ in seen.values()) / 2**30


def make_sample(lengths: Sequence[int], vocab_size: int) -> dict[str, torch.Tensor]:
    """One sample as the host's dataset gives it, with documents of these lengths, on the CPU."""
    total = sum(lengths)
    tokens = torch.randint(vocab_size, (1, total + 1))
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(1, total),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
    }


def uneven_lengths(total: int, documents: int, seed: int = 7) -> list[int]:
    """Lengths of documents cut at random places."""
    random = torch.Generator().manual_seed(seed)
    cuts = (torch.randperm(total - 1, generator=random)[: documents - 1] + 1).sort().values.tolist()
    return [b - a for a, b in pairwise([0, *cuts, total])]


_VIEWS = (
    *("view", "reshape", "_reshape_alias", "as_strided", "expand", "flatten", "unflatten", "squeeze"),
    *("unsqueeze", "transpose", "permute", "t", "numpy_T", "split", "chunk", "unbind", "slice", "select"),
    *("narrow", "detach", "alias", "result_type", "unsafe_view", "_unsafe_view", "view_as", "tensor_split"),
)
"""Operators that launch nothing on a GPU."""


class Counts(NamedTuple):
    """What the profiler saw of one run."""

    launches: int
    """Kernel launches; on a CPU, operators that compute or copy."""
    copies: int
    """Copies of tensors, also from and to the host."""
    syncs: int
    """Times that the host waited for the device; on a CPU, values read into Python."""


def count(function: Callable[[], object]) -> Counts:
    """Profile one run, on a GPU after one that is not looked at."""
    activities = [ProfilerActivity.CPU]
    if not RUNS_ON_CPU:
        activities.append(ProfilerActivity.CUDA)
        function()
        torch.cuda.synchronize()
    with profile(activities=activities) as seen:
        function()
    calls = {event.key: event.count for event in seen.key_averages()}
    return count_calls(calls, on_gpu=not RUNS_ON_CPU)


def count_calls(calls: dict[str, int], on_gpu: bool) -> Counts:
    """The counts in a profiler's calls by name.

    A synchronisation of the whole device is left out: the profiler itself makes one at its end.
    """

    def total(*parts: str) -> int:
        return sum(n for key, n in calls.items() if any(part in key for part in parts))

    copies = total("aten::copy_")
    if not on_gpu:
        views = {f"aten::{name}" for name in (*_VIEWS, "split_with_sizes")}
        work = sum(n for key, n in calls.items() if key.startswith("aten::") and key not in views)
        return Counts(work, copies, total("aten::_local_scalar_dense"))
    return Counts(total("LaunchKernel"), copies, total("cudaStreamSynchronize", "cudaEventSynchronize"))


class Ceilings(NamedTuple):
    """What the machine reaches here and now."""

    tflops: float
    """Of a bf16 matrix product of 8192^3."""
    terabytes: float
    """Read and written per second by a copy, TB/s."""

    @classmethod
    def measure(cls) -> "Ceilings":
        """Measure; on a CPU, ones."""
        return cls(1.0, 1.0) if RUNS_ON_CPU else cls(gpu.matmul_tflops(), gpu.copy_terabytes())

    def floor_parts(self, tokens: int, weights: int, channels: int) -> tuple[float, float]:
        """Milliseconds of a layer's products, forward and backward, and of reading and writing bf16 values.

        Args:
            tokens: of the stream.
            weights: elements of the matrices that every token is multiplied by.
            channels: values that are read or written for every token.
        """
        return 6 * tokens * weights / self.tflops / 1e9, 2 * tokens * channels / self.terabytes / 1e9

    def text(self) -> str:
        """A line for the report."""
        if RUNS_ON_CPU:
            return "- tiny sizes on a CPU: the figures mean nothing"
        return (
            f"{report.gpu()}; here and now a bf16 product of 8192^3 reaches {self.tflops:.0f} TFLOP/s and a "
            f"device copy {self.terabytes:.2f} TB/s"
        )


class LiveReport:
    """A Markdown file that is printed and saved row by row, so that little is lost when time runs out."""

    def __init__(self, folder: Path, name: str, *lines: str):
        """Begin a report.

        Args:
            folder: where to write NAME.md.
            name: of the module in tests/benchmarks.
            *lines: title, text, ceilings; where the figures come from is added.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{name}.md"
        self._lines = [*lines, "", *_provenance(f"python -m tests.benchmarks.{name}")]
        print("\n".join(self._lines), flush=True)
        self._save()

    def table(self, title: str, head: Sequence[object]) -> None:
        """Begin a table; the first column is text, the others are figures."""
        self._add("", f"## {title}", "", *report.table(head, []).splitlines())

    def row(self, *cells: object) -> None:
        """Add a row to the last table."""
        self._add("| " + " | ".join(map(str, cells)) + " |")

    def text(self, *lines: str) -> None:
        """Add text below what is there."""
        self._add("", *lines)

    def verdict(self, missed: Sequence[str], kept: str = "every bound is kept") -> int:
        """Write what was missed, or `kept`; the exit status."""
        self.text(*(f"- {line}" for line in missed or [kept]))
        return int(bool(missed))

    def _add(self, *lines: str) -> None:
        self._lines += lines
        print("\n".join(lines), flush=True)
        self._save()

    def _save(self) -> None:
        self._file.write_text("\n".join(self._lines) + "\n")


def _provenance(command: str) -> list[str]:
    """As `report.provenance`, with the packages that are installed."""
    installed = []
    for package in PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            continue
        installed.append(package)
    return report.provenance(command, *installed)


def missed_times(host: float | None, ours: float, floor: float, faster: float, at_most: float) -> list[str]:
    """Where a layer's time falls short, in words.

    Args:
        host: time of the host's layer; None if there is none.
        ours: of ours.
        floor: what any layer would take.
        faster: times that the host's is to be longer, at least.
        at_most: of the floor.
    """
    missed = []
    if host is not None and host / ours < faster:
        missed.append(f"{host / ours:.2f} times the host's speed, wanted {faster:g}")
    if ours / floor > at_most:
        missed.append(f"{ours / floor:.2f} of the floor, wanted {at_most:g} at most")
    return missed


def empty_cache() -> None:
    """Give unused memory back, so that the next layer or model starts from an empty device."""
    gc.collect()
    if not RUNS_ON_CPU:
        torch.cuda.empty_cache()
