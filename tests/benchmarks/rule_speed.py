"""How fast is our torch gated delta rule on a CPU, beside transformers' torch rule at the same size?

python -m tests.benchmarks.rule_speed      from the root of the repository; writes results/rule_speed.md

Exit status 1 if ours takes more than LIMIT times as long anywhere.
"""

import gc
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.ops.gated_delta_rule import gated_delta_rule
from megatron_gdn.rows import Rows
from tests.benchmarks.report import RESULTS, provenance, table
from tests.helpers.rule import normalised

LIMIT = 3.0
REPEATS = 5
CPU = torch.device("cpu")
DOCUMENT_LENGTHS = (1, 7, 40, 65, 130, 257)
"""Tokens of the documents in a packed stream, over and over."""


@dataclass(frozen=True)
class Shape:
    """R rows of s tokens; h key heads, H value heads, all of one dim."""

    num_rows: int
    row_len: int
    key_heads: int
    value_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.row_len}, heads {self.key_heads}/{self.value_heads} x {self.dim}"


SHAPES = (
    Shape(1, 512, 2, 4, 32),
    Shape(2, 2048, 2, 4, 32),
    Shape(1, 4096, 2, 4, 32),
    Shape(2, 512, 4, 8, 64),
    Shape(1, 4096, 4, 8, 64),
    Shape(1, 512, 16, 32, 128),
    Shape(1, 2048, 16, 32, 128),
)


@dataclass(frozen=True)
class Times:
    """Medians in seconds of CPU time of one thread."""

    forward: float
    both: float
    """Forward and backward."""


def make_inputs(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, a, b, A_log, dt_bias, as a layer makes them."""
    R, s, h, H, D = shape.num_rows, shape.row_len, shape.key_heads, shape.value_heads, shape.dim
    q, k, v = (torch.randn(R, s, heads, D, dtype=dtype) for heads in (h, h, H))
    a, b = (torch.randn(R, s, H, dtype=dtype) for _ in range(2))
    A_log, dt_bias = torch.rand(H).mul(15).add(1).log(), torch.ones(H)
    return [x.requires_grad_() for x in (q, k, v, a, b, A_log, dt_bias)]


def packed_borders(row_len: int) -> tuple[int, ...]:
    """Borders of short documents that fill a row."""
    repeated = DOCUMENT_LENGTHS * (row_len // sum(DOCUMENT_LENGTHS) + 1)
    return (0, *(border for border in accumulate(repeated) if border < row_len), row_len)


def transformers_rule() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The torch chunk rule inside; what is wrapped around it would call a kernel."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    return inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)


def run_theirs(rule: Callable, q, k, v, a, b, A_log, dt_bias) -> Tensor:
    """What transformers' layer does around its rule: gates, and key heads repeated for their value heads."""
    groups = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(groups, dim=2) for x in (q, k))
    g = -A_log.exp() * F.softplus(a.float() + dt_bias)
    return rule(q, k, v, g, b.sigmoid(), use_qk_l2norm_in_kernel=True)[0]


def measure(
    functions: dict[str, Callable[..., Tensor]], inputs: list[Tensor], repeats: int
) -> dict[str, Times]:
    """Time the functions in turn, so that what disturbs the machine disturbs all; the first turn warms up."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    gradient = torch.randn_like(inputs[2])
    for _ in range(repeats + 1):
        for name, function in functions.items():
            gc.collect()
            start = time.process_time()
            out = function(*inputs)
            middle = time.process_time()
            torch.autograd.grad(out, inputs, gradient)
            seen[name].append((middle - start, time.process_time() - start))
    return {
        name: Times(*map(statistics.median, zip(*times[1:], strict=True))) for name, times in seen.items()
    }


def check_same(ours: Tensor, theirs: Tensor) -> None:
    """Refuse to compare the speed of different results."""
    error = (ours - theirs).float().norm() / theirs.float().norm()
    if not error <= (1e-4 if ours.dtype == torch.float32 else 2e-2):
        raise RuntimeError(f"ours and transformers' rule differ by {error:.1e}")


def compare(shape: Shape, dtype: torch.dtype, repeats: int = REPEATS) -> dict[str, Times]:
    """Times of "ours", "theirs" and ours on a stream of short documents, "packed"."""
    torch.manual_seed(1234)
    inputs = make_inputs(shape, dtype)
    rule, s = transformers_rule(), shape.row_len
    whole = Rows.from_ranges((0, s), ((0, s),), shape.num_rows, CPU)
    packed = Rows.from_ranges(packed_borders(s), ((0, s),), shape.num_rows, CPU)
    functions = {
        "ours": lambda *x: gated_delta_rule(*normalised(x), whole),
        "theirs": lambda *x: run_theirs(rule, *x),
        "packed": lambda *x: gated_delta_rule(*normalised(x), packed),
    }
    with torch.no_grad():
        check_same(functions["ours"](*inputs), functions["theirs"](*inputs))
    return measure(functions, inputs, repeats)


def ratios(times: dict[str, Times]) -> list[float]:
    """Ours over theirs, forward and with backward; then the same for our packed stream."""
    theirs = times["theirs"]
    return [
        ratio
        for name in ("ours", "packed")
        for ratio in (times[name].forward / theirs.forward, times[name].both / theirs.both)
    ]


def speed_table(results: dict[tuple[Shape, torch.dtype], dict[str, Times]]) -> str:
    """The Markdown table."""
    names = ("ours", "theirs")
    head = ["rows x tokens, heads", "dtype", *(f"{name} fwd, ms" for name in names)]
    head += [*(f"{name} fwd+bwd, ms" for name in names)]
    head += ["ratio fwd", "ratio fwd+bwd", "packed: ratio fwd", "packed: ratio fwd+bwd"]
    rows = []
    for (shape, dtype), times in results.items():
        figures = [times[name].forward for name in names] + [times[name].both for name in names]
        figures = [f"{1000 * seconds:,.1f}" for seconds in figures]
        rows.append(
            [shape, str(dtype).removeprefix("torch."), *figures, *(f"{r:.2f}" for r in ratios(times))]
        )
    return table(head, rows)


def main() -> int:
    """Measure, print and write the table."""
    torch.set_num_threads(1)
    results = {}
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            results[shape, dtype] = compare(shape, dtype)
            shown = ", ".join(f"{r:.2f}" for r in ratios(results[shape, dtype]))
            print(f"{shape}, {dtype}: {shown}", flush=True)
    head = [
        "# The torch gated delta rule beside transformers' torch rule",
        "",
        f"CPU time of one thread, median of {REPEATS} alternating repeats in one process; heads are "
        "key / value heads x dim. Both begin with raw gates and end with the output, and agree in it. "
        f"Packed: ours on a stream cut into documents of {', '.join(map(str, DOCUMENT_LENGTHS))} tokens in "
        "turn, which theirs cannot do, over theirs on the uncut stream. "
        f"Bound: every ratio at most {LIMIT:g}.",
        "",
        *provenance("python -m tests.benchmarks.rule_speed", "transformers"),
        "",
    ]
    text = "\n".join(head) + "\n" + speed_table(results)
    print(text)
    (RESULTS / "rule_speed.md").write_text(text)
    return int(any(ratio > LIMIT for times in results.values() for ratio in ratios(times)))


if __name__ == "__main__":
    sys.exit(main())
