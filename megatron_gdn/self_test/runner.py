"""The table of checks, how exact each must be, and how they run: on one rank, or on all before training."""

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gdn.self_test import layers, mixers
from megatron_gdn.self_test.cases import Case, Setup, Source

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 6e-3}
"""Largest relative root mean square of a difference, by the model's dtype. fp32: rounding of 6e-8 through
the recurrence and its sums, some 1e-6; TF32, 5e-4, is not fp32. bf16 and fp16: operands of tensor cores are
rounded, 2e-3 each at most, and sums are fp32; flash-linear-attention's own tests allow 2e-3 to 6e-3."""
GATES = ("a", "b", "A_log", "dt_bias")
GATE_FACTOR = 10 / 3
"""The gates' gradients are differences of such sums."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    make: Callable[[Setup, Source], Case]
    applies: Callable[[Setup], bool] = lambda setup: True


@dataclass(frozen=True)
class Result:
    """What came of a check."""

    name: str
    kernel: str
    """Empty where the case could not even be made."""
    problem: str | None
    """None if all is well."""
    error: float
    """Largest relative error of all tensors, in units of what is allowed for the tensor."""
    seconds: float

    def __str__(self) -> str:
        kernel = f" ({self.kernel})" if self.kernel else ""
        return f"{self.name}{kernel}: {self.problem or 'ok'}"


def _mixer(name: str, make: Callable[..., Case], needed: str = "", **spans: int) -> Iterator[Check]:
    """A check on one document and one on several; `needed` is the switch of `Setup` that asks for it."""
    for packed, kind in ((False, "one document"), (True, "documents")):
        yield Check(
            f"{name}, {kind}",
            partial(make, packed=packed, **spans),
            lambda s, packed=packed: (s.packed if packed else s.whole) and (not needed or getattr(s, needed)),
        )


def _has_experts(setup: Setup) -> bool:
    return setup.num_experts > 0


CHECKS: tuple[Check, ...] = (
    *_mixer("gated delta rule", mixers.rule, num_spans=1),
    *_mixer("gated delta rule with states passed on", mixers.rule, "passes_state", num_spans=3),
    *_mixer("convolution", mixers.convolution, num_spans=1),
    *_mixer("convolution with tokens passed on", mixers.convolution, "passes_state", num_spans=3),
    *_mixer("attention", mixers.attention),
    *_mixer("attention to earlier spans", mixers.attention_to_earlier_spans, "splits_attention"),
    Check("queries and keys", layers.queries_and_keys),
    Check("output gate", layers.output_gate, lambda s: s.output_gate),
    Check("norm", layers.norm),
    Check("gated norm", layers.gated_norm),
    Check("router", layers.router, lambda s: _has_experts(s) and s.dtype == torch.bfloat16),
    Check("rows of experts", layers.rows_of_experts, _has_experts),
    Check("SwiGLU of experts", layers.swiglu, _has_experts),
    Check("products of experts", layers.experts, _has_experts),
    Check("loss", layers.loss),
)


def run_checks(setup: Setup) -> Iterator[Result]:
    """Run every check that applies, one after another. No communication; torch's random state stays."""
    for check in CHECKS:
        if check.applies(setup):
            yield run_check(check, setup)


def run_check(check: Check, setup: Setup) -> Result:
    """Run one check. Whatever it raises is its problem, told by its first line."""
    start, kernel, worst, problem = time.perf_counter(), "", 0.0, None
    try:
        case = check.make(setup, Source(setup))
        kernel = case.kernel
        got = case.run(list(case.inputs.values()), case.upstream)
        want = case.truth([x.double() for x in case.inputs.values()], case.upstream.double())
        names = ["the output", *(f"the gradient of {name}" for name in case.inputs)]
        worst, problem = compare(names, got, want, setup.dtype)
    except Exception as error:  # anything a kernel library may raise, reported in full view
        lines = str(error).strip().splitlines()
        worst, problem = (
            float("inf"),
            f"FAILED: {type(error).__name__}: {lines[0] if lines else 'no message'}",
        )
    return Result(check.name, kernel, problem, worst, time.perf_counter() - start)


def compare(
    names: list[str], got: list[Tensor], want: list[Tensor], dtype: torch.dtype
) -> tuple[float, str | None]:
    """(largest relative error in units of its tolerance, what is wrong or None)."""
    worst = 0.0
    problem = None
    for name, g, w in zip(names, got, want, strict=True):
        if g.shape != w.shape:
            return float("inf"), f"FAILED: {name} has shape {tuple(g.shape)}, not {tuple(w.shape)}"
        gate = name.rpartition(" ")[2] in GATES
        tolerance = TOLERANCES[dtype] * (GATE_FACTOR if gate else 1)
        difference, size = (g.double() - w).norm().item(), w.norm().item()
        error = difference / size if size else difference and float("inf")
        if error != error:  # not a number: the comparisons below would all be false
            error = float("inf")
        if error / tolerance > worst:
            worst = error / tolerance
            if worst > 1:
                problem = f"FAILED: relative error {error:.1e} in {name}, at most {tolerance:.1e} is right"
    return worst, problem


def check_all_ranks(setup: Setup, group: dist.ProcessGroup, say: Callable[[str], None]) -> None:
    """Run the checks on every rank and let all ranks know of all failures.

    Args:
        setup: of this rank.
        group: all ranks.
        say: takes a line for people; called on every rank.

    Raises:
        RuntimeError: a check failed on some rank; the same on every rank.

    Communication: one gathering of the failures over `group`.
    """
    start = time.perf_counter()
    if setup.on_gpu:
        say("self-test of the kernels; the first run on a machine compiles them, which takes minutes ...")
    results = list(run_checks(setup))
    if setup.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setup.device)
    failures: list[list[str]] = [[] for _ in range(group.size())]
    mine = [f"{socket.gethostname()}, {setup.device}: {result}" for result in results if result.problem]
    dist.all_gather_object(failures, mine, group)
    told = [f"rank {rank}, {each}" for rank, found in enumerate(failures) for each in found]
    if told:
        more = f"; and {len(told) - 4} more" if len(told) > 4 else ""
        raise RuntimeError(
            f"the self-test found kernels that do not compute what they should: {'; '.join(told[:4])}{more}. "
            "`python -m megatron_gdn doctor` on that machine says more; choose another kernel "
            "(--gdn-backend), leave the machine out, or train with --no-self-test."
        )
    say(f"self-test: {len(results)} kernels right on every rank, {time.perf_counter() - start:.1f} s")
