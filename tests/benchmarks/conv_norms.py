"""How fast are convolution, l2norm, gates and norms, beside flash-linear-attention's kernels and plain torch?

python -m tests.benchmarks.conv_norms    on a GPU, from the root of the repository; writes
results/conv_norms.md

Exit status 1 if results differ or the bound is missed.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.benchmarks import runs  # isort: split

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.ops import norms
from megatron_gdn.ops.causal_conv import causal_conv1d_silu
from megatron_gdn.ops.gated_delta_rule_gates import gates
from megatron_gdn.rows import Rows
from tests.benchmarks.gpu import milliseconds

TOKENS, KEY_HEADS, VALUE_HEADS, DIM, WIDTH, HIDDEN = 32_768, 16, 32, 128, 4, 2048
QK, V = KEY_HEADS * DIM, VALUE_HEADS * DIM
CHANNELS = 2 * QK + V
BOUND = 1.3
"""Milliseconds for convolution, l2norm and gates, forward and backward."""
DOCUMENTS = {
    "one document": (0, TOKENS),
    "documents of 1,000": (*range(0, TOKENS, 1000), TOKENS),
}


class Path(NamedTuple):
    """One way to compute something."""

    name: str
    run: Callable[..., Sequence[Tensor]]


class Case(NamedTuple):
    """What is computed, in which ways, and how many bytes it must read and write at least."""

    title: str
    inputs: list[Tensor]
    paths: list[Path]
    bytes_forward: int
    bytes_backward: int


def projected() -> tuple[Tensor, ...]:
    """Queries, keys and values; output gate; write gates; decay gates: views of one tensor."""
    sizes = [CHANNELS, V, VALUE_HEADS, VALUE_HEADS]
    return torch.randn(1, TOKENS, sum(sizes), device=runs.DEVICE, dtype=torch.bfloat16).split(sizes, -1)


def rows_of(borders: tuple[int, ...]) -> Rows:
    return Rows.from_ranges(borders, ((0, TOKENS),), 1, runs.DEVICE)


def ours_conv(borders: tuple[int, ...]) -> Callable[..., Sequence[Tensor]]:
    """Convolution, SiLU, l2norm and gates as a layer calls them."""
    rows = rows_of(borders)

    def run(qkv, b, a, weight, A_log, dt_bias):
        q, k, v = causal_conv1d_silu(qkv, weight, rows, sizes=(QK, QK, V), norm_dims=(DIM, DIM, None))
        return q, k, v, *gates(a, b, A_log, dt_bias)

    return run


def fla_conv(borders: tuple[int, ...]) -> Callable[..., Sequence[Tensor]]:
    """The same of flash-linear-attention's kernels, as the rule wants its arguments: contiguous."""
    from fla.modules.conv import causal_conv1d
    from fla.modules.l2norm import l2norm
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate

    rows = rows_of(borders)

    def run(qkv, b, a, weight, A_log, dt_bias):
        out, _ = causal_conv1d(
            x=qkv.contiguous(),
            weight=weight,
            activation="silu",
            cu_seqlens=rows.cu_seqlens,
            cu_seqlens_cpu=rows.cu_seqlens_cpu,
        )
        q, k, v = (x.contiguous() for x in out.split([QK, QK, V], -1))
        q, k = (l2norm(x.unflatten(-1, (-1, DIM))).flatten(-2) for x in (q, k))
        return q, k, v, fused_gdn_gate(a.contiguous(), A_log, dt_bias), b.float().sigmoid()

    return run


def conv_case(documents: str) -> Case:
    """On parts of what a layer's projection gives, as they lie there."""
    qkv, _, b, a = projected()
    inputs = [
        qkv,
        b,
        a,
        torch.randn(CHANNELS, WIDTH, device=runs.DEVICE, dtype=torch.bfloat16),
        torch.linspace(-4, 2, VALUE_HEADS, device=runs.DEVICE),
        torch.randn(VALUE_HEADS, device=runs.DEVICE),
    ]
    borders = DOCUMENTS[documents]
    paths = [Path("ours", ours_conv(borders)), Path("fla", fla_conv(borders))]
    x, raw, made = 2 * TOKENS * CHANNELS, 2 * TOKENS * 2 * VALUE_HEADS, 4 * TOKENS * 2 * VALUE_HEADS
    return Case(
        f"convolution, SiLU, l2norm and gates, {documents}",
        inputs,
        paths,
        2 * x + raw + made,
        3 * x + 2 * raw + made,
    )


def norm_case() -> Case:
    """The zero-centred RMSNorm before a layer."""

    def ours(x, weight):
        return [norms.rms_norm(x, weight, 1e-6, True)]

    def plain(x, weight):
        return [norms.torch_norm(x, weight, 1e-6, True)]

    def fused(x, weight):
        from fla.modules.layernorm import rms_norm

        return [rms_norm(x, (1 + weight.float()).to(x.dtype), None, eps=1e-6)]

    inputs = [
        torch.randn(TOKENS, 1, HIDDEN, device=runs.DEVICE, dtype=torch.bfloat16),
        torch.randn(HIDDEN, device=runs.DEVICE, dtype=torch.bfloat16),
    ]
    paths = [Path("ours", ours), Path("fla", fused), Path("torch", plain)]
    return Case(f"RMSNorm of {HIDDEN}", inputs, paths, 2 * inputs[0].nbytes, 3 * inputs[0].nbytes)


def gated_norm_case() -> Case:
    """The gated norm after the rule; the gate is a part of the projection's output."""

    def ours(x, gate, weight):
        return [norms.gated_rms_norm(x, gate.unflatten(-1, (-1, DIM)), weight, 1e-6, True)]

    def plain(x, gate, weight):
        gate = F.silu(gate.unflatten(-1, (-1, DIM)).float())
        return [(norms.torch_norm(x, weight, 1e-6, True) * gate).to(x.dtype)]

    def fused(x, gate, weight):
        from fla.modules.fused_norm_gate import rms_norm_gated

        gate = gate.contiguous().unflatten(-1, (-1, DIM))
        return [rms_norm_gated(x, gate, 1 + weight, None, "swish", eps=1e-6)]

    inputs = [
        torch.randn(1, TOKENS, VALUE_HEADS, DIM, device=runs.DEVICE, dtype=torch.bfloat16),
        projected()[1],
        torch.randn(DIM, device=runs.DEVICE),
    ]
    paths = [Path("ours", ours), Path("fla", fused), Path("torch", plain)]
    return Case(
        f"gated RMSNorm of {VALUE_HEADS} heads of {DIM}",
        inputs,
        paths,
        3 * inputs[0].nbytes,
        5 * inputs[0].nbytes,
    )


def leaves_of(case: Case) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in case.inputs]


def check_same(case: Case, path: Path, upstream: list[Tensor], want: list[Tensor]) -> None:
    """Refuse to compare the speed of different results."""
    leaves = leaves_of(case)
    outputs = path.run(*leaves)
    grads = torch.autograd.grad(outputs, leaves, upstream)
    for i, (got, right) in enumerate(zip((*outputs, *grads), want, strict=True)):
        error = runs.relative_error(got, right)
        if not error <= 2e-2:
            raise RuntimeError(f"{case.title}, {path.name}: result {i} differs from the first by {error:.1e}")


def times_of(case: Case, path: Path, upstream: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of forward and of backward."""
    leaves = leaves_of(case)
    with torch.no_grad():
        forward = milliseconds(lambda: path.run(*case.inputs))
    outputs = path.run(*leaves)
    backward = milliseconds(lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True))
    return forward, backward


def measure(case: Case, terabytes: float) -> list[list[str]]:
    """A row for each path, and the floor."""
    first = case.paths[0]
    leaves = leaves_of(case)
    outputs = first.run(*leaves)
    upstream = [torch.randn_like(out) for out in outputs]
    want = [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, upstream)]
    lines = []
    for path in case.paths:
        check_same(case, path, upstream, want)
        forward, backward = times_of(case, path, upstream)
        lines.append((path.name, forward, backward))
    floor = [count / terabytes / 1e9 for count in (case.bytes_forward, case.bytes_backward)]
    lines.append(("floor", *floor))
    base = sum(lines[0][1:])
    return [
        [name, f"{f:.3f}", f"{b:.3f}", f"{f + b:.3f}", f"{(f + b) / base:.2f}", f"{(f + b) / sum(floor):.2f}"]
        for name, f, b in lines
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the tables."""
    arguments = runs.read_arguments(__doc__, argv, tiny=False)
    ceilings = runs.Ceilings.measure()
    torch.manual_seed(1234)
    report = runs.LiveReport(
        arguments.results,
        "conv_norms",
        "# Convolution, gates and norms on a GPU",
        "",
        f"{TOKENS:,} tokens in bf16; {KEY_HEADS} key and {VALUE_HEADS} value heads of {DIM}, {CHANNELS} "
        f"channels, width {WIDTH}. Milliseconds of forward, of backward to all inputs and parameters, of "
        "both, and both relative to ours and to the floor: every input read once, every result written "
        "once, at the rate of a device copy. Inputs are parts of a projection's output as they lie there; "
        "fla's kernels copy them. "
        f"Bound: convolution, l2norm and gates in at most {BOUND} ms.",
        "",
        ceilings.text(),
    )
    cases = [lambda name=name: conv_case(name) for name in DOCUMENTS]
    missed = []
    for make in (*cases, norm_case, gated_norm_case):
        case = make()
        report.table(case.title, ["path", "forward", "backward", "both", "of ours", "of the floor"])
        rows = measure(case, ceilings.terabytes)
        for row in rows:
            report.row(*row)
        if case.title.startswith("convolution") and float(rows[0][3]) > BOUND:
            missed.append(f"{case.title}: {rows[0][3]} ms, wanted {BOUND:g} at most")
        torch.cuda.empty_cache()
    return report.verdict(missed, "the bound is kept")


if __name__ == "__main__":
    sys.exit(main())
