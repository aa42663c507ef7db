"""Our Triton kernels against the plain torch that stands behind the same doors, in float64.

On a GPU they run in fp32 and bf16. Without one they run in fp32 in Triton's interpreter, which has to be
asked for before Triton is imported: `test_in_the_interpreter` runs this file in a process that does so.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor

from megatron_gdn.ops import causal_conv_triton, triton_rows
from megatron_gdn.ops.causal_conv import _TritonConv, causal_conv1d_silu
from megatron_gdn.ops.gated_delta_rule_gates import _TritonGates
from megatron_gdn.ops.norms import _TritonNorm
from megatron_gdn.ops.output_gate import _TritonGate
from megatron_gdn.ops.qk_norm_rope import _TritonSplitNormRope, heads_of
from megatron_gdn.rows import Rows
from tests.helpers.cases import FP32_TRUTH
from tests.helpers.compare import assert_close
from tests.helpers.interpreter import take_loop_bounds_from_arguments
from tests.helpers.reference import apply_rope_reference, causal_conv_reference, l2_normalise
from tests.helpers.reference import rms_norm as rms_norm_reference

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:
    take_loop_bounds_from_arguments()
BF16 = 4e-3
"""Rounding of a bf16 result, 2^-9 of its size at most."""
BF16_SUMS = 8e-3
"""Sums over tokens of products of bf16 gradients, rounded once more."""
GPU_MACHINES = [
    pytest.param(("cuda", dtype), id=f"cuda-{name}", marks=pytest.mark.gpu(1))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
]
MACHINES = [pytest.param(("cpu", torch.float32), id="interpreted")] if INTERPRETED else GPU_MACHINES


@pytest.mark.skipif(INTERPRETED, reason="this is the process in the interpreter")
def test_in_the_interpreter():
    """Every test below passes in Triton's interpreter; only this one and those of full size are skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=280)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed, skipped = (re.search(rf"(\d+) {word}", summary) for word in ("passed", "skipped"))
    assert int(passed[1]) >= 38 and int(skipped[1]) <= 3, summary


def compare(
    ours: Callable[..., Sequence[Tensor]],
    truth: Callable[..., Sequence[Tensor]],
    inputs: dict[str, Tensor],
    machine,
    parameters: Sequence[str] = (),
):
    """Outputs and the gradient of every input, for random upstream gradients.

    Args:
        ours: from inputs on the machine, in its dtype, to outputs.
        truth: from inputs in float64 to the same outputs.
        inputs: fp32 on the CPU, by name.
        machine: device and dtype.
        parameters: those whose gradients are sums over tokens; fp32 on every machine.
    """
    device, dtype = machine
    inputs = {name: x if name in parameters else x.to(dtype) for name, x in inputs.items()}
    exact = {name: x.double().requires_grad_() for name, x in inputs.items()}
    mine = {name: x.to(device).requires_grad_() for name, x in inputs.items()}
    want, got = truth(**exact), ours(**mine)
    upstream = [torch.randn_like(x).to(y.dtype) for x, y in zip(want, got, strict=True)]
    want_grads = torch.autograd.grad(want, list(exact.values()), [x.double() for x in upstream])
    grads = torch.autograd.grad(got, list(mine.values()), [x.to(device) for x in upstream])
    low = dtype == torch.bfloat16
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_close(f"output {i}", g, w, BF16 if low else FP32_TRUTH, dtype=g.dtype)
    for name, g, w in zip(inputs, grads, want_grads, strict=True):
        tolerance = (BF16_SUMS if name in parameters else BF16) if low else FP32_TRUTH
        assert_close(f"d {name}", g, w, tolerance, dtype=inputs[name].dtype)


# Rows of the packed stream, borders of its documents. Spans of the kernels are cut down to 8 and 16 tokens.
CONV_CASES = {
    # Documents of 1 to 3 tokens and more, empty ones, one that ends with a span and one at a row's end.
    "documents": (27, (0, 1, 3, 6, 6, 8, 16, 17, 27), 1),
    # Three rows of 9, which documents run through; what came before each is in the halo.
    "halo": (27, (0, 7, 7, 10, 17, 27), 3),
    # Rows shorter than the taps reach.
    "short rows": (4, (0, 1, 4), 2),
    "one document": (17, (0, 17), 1),
}
SECTIONS = {
    "q, k, v": ((32, 16, 24), (16, 16, None)),
    "heads": ((48,), (16,)),
    "one": ((40,), (None,)),
}


def conv_rows(case: str, device: str) -> Rows:
    seq_len, borders, num_rows = CONV_CASES[case]
    span = seq_len // num_rows
    ranges = tuple((i * span, (i + 1) * span) for i in range(num_rows))
    return Rows.from_ranges(borders, ranges, 1, torch.device(device))


def halo_of(x: Tensor, taps: int, num_rows: int) -> Tensor:
    """The `taps` tokens before each row of x [1, S, C], zeros before the first; [R, taps, C]."""
    padded = torch.cat([torch.zeros_like(x[0, :taps]), x[0]])
    span = x.shape[1] // num_rows
    return torch.stack([padded[i * span : i * span + taps] for i in range(num_rows)])


def conv_truth(x: Tensor, weight: Tensor, positions: Tensor, sections) -> list[Tensor]:
    sizes, norm_dims = sections
    parts = causal_conv_reference(x, weight, positions).split(sizes, -1)
    return [
        y if dim is None else l2_normalise(y.unflatten(-1, (-1, dim))).flatten(-2)
        for y, dim in zip(parts, norm_dims, strict=True)
    ]


@pytest.fixture
def short_spans(monkeypatch):
    """Programs of few tokens and channels, so that small tensors need several."""
    monkeypatch.setattr(causal_conv_triton, "SPAN", 8)
    monkeypatch.setattr(causal_conv_triton, "SPAN_BACKWARD", 16)
    monkeypatch.setattr(causal_conv_triton, "CHANNELS", 32)
    monkeypatch.setattr(causal_conv_triton, "PLAIN_DIM", 16)


@pytest.mark.parametrize(
    "case, sections, width",
    [
        ("documents", "heads", 4),
        ("halo", "q, k, v", 4),
        ("short rows", "one", 4),
        ("one document", "one", 4),
        ("halo", "one", 2),
        ("documents", "one", 3),
        ("documents", "one", 1),
    ],
)
@pytest.mark.parametrize("machine", MACHINES)
def test_conv(machine, case, sections, width, short_spans):
    """Documents, rows with what came before them, channels and tokens that do not fill a block."""
    seq_len, borders, num_rows = CONV_CASES[case]
    rows, sections = conv_rows(case, machine[0]), SECTIONS[sections]
    positions = conv_rows(case, "cpu").positions.reshape(1, -1)
    channels = sum(sections[0])

    def ours(x, weight):
        halo = halo_of(x, width - 1, num_rows) if num_rows > 1 and width > 1 else None
        # A part of something wider, as the projection's output is.
        wide = torch.cat([x, x[..., :16]], -1).unflatten(1, (num_rows, -1))[0]
        outs = _TritonConv.apply(wide[..., :channels], weight, halo, rows, tuple(zip(*sections, strict=True)))
        return [out.flatten(0, 1).unsqueeze(0) for out in outs]

    inputs = {"x": torch.randn(1, seq_len, channels), "weight": torch.randn(channels, width)}
    truth = lambda x, weight: conv_truth(x, weight, positions, sections)  # noqa: E731
    compare(ours, truth, inputs, machine, parameters=("weight",))


@pytest.mark.parametrize("machine", MACHINES)
def test_conv_of_a_batch(machine, short_spans):
    """sbhd: rows are every B-th token of the projection's output."""
    sections = ((48, 8), (16, None))
    rows = Rows.from_ranges((0, 9), ((0, 9),), 2, torch.device(machine[0]))

    def ours(x, weight):
        return _TritonConv.apply(x.transpose(0, 1), weight, None, rows, tuple(zip(*sections, strict=True)))

    def truth(x, weight):
        positions = torch.arange(9).repeat(2, 1)
        return conv_truth(x.transpose(0, 1), weight, positions, sections)

    inputs = {"x": torch.randn(9, 2, sum(sections[0])), "weight": torch.randn(sum(sections[0]), 4)}
    compare(ours, truth, inputs, machine, parameters=("weight",))


@pytest.mark.parametrize("tokens", (5, 70))
@pytest.mark.parametrize("machine", MACHINES)
def test_gates(machine, tokens):
    """Two rows, views of one tensor; gates from closed to wide open."""

    def ours(ba, A_log, dt_bias):
        b, a = ba.transpose(0, 1).chunk(2, -1)
        return _TritonGates.apply(a, b, A_log, dt_bias)

    def truth(ba, A_log, dt_bias):
        b, a = ba.transpose(0, 1).chunk(2, -1)
        return -A_log.exp() * torch.nn.functional.softplus(a + dt_bias), b.sigmoid()

    inputs = {
        "ba": torch.randn(tokens, 2, 12) * torch.tensor([1.0, 20.0])[:, None],
        "A_log": torch.linspace(-4, 2.7, 6),
        "dt_bias": torch.randn(6),
    }
    compare(ours, truth, inputs, machine, parameters=("A_log", "dt_bias"))


def test_gates_nearly_closed():
    """Below fp32's 1 + e^x, softplus is e^x, not zero."""
    device = "cpu" if INTERPRETED else "cuda"
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU or the interpreter")
    a = torch.tensor([-30.0, -20.0, -16.0, -5.0, 0.0, 5.0, 100.0], device=device).view(1, 7, 1)
    g, _ = _TritonGates.apply(a, a, torch.zeros(1, device=device), torch.zeros(1, device=device))
    want = -torch.nn.functional.softplus(a.double().cpu())
    assert ((g.double().cpu() - want) / want).abs().max() < 1e-6


@pytest.mark.parametrize("zero_centered", (True, False))
@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("dim", (16, 40))
@pytest.mark.parametrize("machine", MACHINES)
def test_norms(machine, dim, gated, zero_centered, monkeypatch):
    """Rows that do not fill a block, several blocks per program, parts of a wider tensor."""
    monkeypatch.setattr(triton_rows, "TILE", 128)
    shape = (7, 2, 3, dim)

    def ours(x, weight, gate=None):
        x, gate = x[..., 8:].unflatten(-1, (3, dim)), None if gate is None else gate.view(shape)
        return [_TritonNorm.apply(x, gate, weight, 1e-5, zero_centered)]

    def truth(x, weight, gate=None):
        x = rms_norm_reference(x[..., 8:].unflatten(-1, (3, dim)), weight, 1e-5, zero_centered)
        return [x if gate is None else x * torch.nn.functional.silu(gate.view(shape))]

    inputs = {"x": torch.randn(7, 2, 8 + 3 * dim), "weight": torch.randn(dim)}
    if gated:
        inputs["gate"] = torch.randn(7, 2, 3 * dim)
    compare(ours, truth, inputs, machine, parameters=("weight",))


def angle_tables(positions: Tensor, rot_dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine as `rope_tables` has them, of positions [s]."""
    angles = torch.outer(positions.double(), 1e4 ** -(torch.arange(0, rot_dim, 2).double() / rot_dim))
    angles = torch.cat([angles, angles], -1)[:, None, None]
    return angles.cos().float().to(device), angles.sin().float().to(device)


@pytest.mark.parametrize("zero_centered", (True, False))
@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize(
    "groups, queries, dim, share",
    ((1, 4, 16, 0.25), (2, 3, 40, 0.5), (3, 1, 8, 1.0), (2, 2, 16, 0.0)),
)
@pytest.mark.parametrize("machine", MACHINES)
def test_split_norm_rope(machine, groups, queries, dim, share, gated, zero_centered, monkeypatch):
    """Rows that do not fill a block, several blocks per program, two documents, part of the head turned."""
    monkeypatch.setattr(triton_rows, "TILE", 128)
    sizes = *[queries * dim] * (2 if gated else 1), dim, dim
    positions = torch.cat([torch.arange(4), torch.arange(3)])
    tables = angle_tables(positions, int(share * dim), machine[0])

    def ours(qkv, q_weight, k_weight):
        return _TritonSplitNormRope.apply(qkv, sizes, q_weight, k_weight, *tables, 1e-5, zero_centered)

    def truth(qkv, q_weight, k_weight):
        query, *others, key, value = heads_of(qkv, sizes)
        query, key = (
            apply_rope_reference(
                rms_norm_reference(x, weight, 1e-5, zero_centered).transpose(0, 1),
                positions.expand(2, -1),
                rotary_percent=share,
                base=1e4,
            ).transpose(0, 1)
            for x, weight in ((query.flatten(2, 3), q_weight), (key, k_weight))
        )
        return query, *others, key, value

    inputs = {
        "qkv": torch.randn(7, 2, groups, sum(sizes)),
        "q_weight": torch.randn(dim),
        "k_weight": torch.randn(dim),
    }
    compare(ours, truth, inputs, machine, parameters=("q_weight", "k_weight"))


@pytest.mark.parametrize("heads, dim", ((4, 16), (3, 40)))
@pytest.mark.parametrize("machine", MACHINES)
def test_output_gate(machine, heads, dim, monkeypatch):
    """Gates that are parts of a projection, from closed to wide open."""
    monkeypatch.setattr(triton_rows, "TILE", 128)

    def ours(x, projection):
        return [_TritonGate.apply(x, projection[..., 8:-8].unflatten(-1, (heads, dim)))]

    def truth(x, projection):
        return [x * projection[..., 8:-8].flatten(2).sigmoid()]

    inputs = {
        "x": torch.randn(7, 2, 2 * heads * dim),
        "projection": 5 * torch.randn(7, 2, 2, heads * dim + 16),
    }
    compare(ours, truth, inputs, machine)


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_to_do(machine):
    """No tokens at all: zero gradients, not what was in memory."""
    device, dtype = machine
    x, weight = torch.randn(0, 2, 16, device=device, dtype=dtype), torch.randn(16, device=device)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = _TritonNorm.apply(x, None, weight, 1e-5, True)
    _, d_weight = torch.autograd.grad(out, (x, weight), torch.randn_like(out))
    assert d_weight.eq(0).all()
    qkv = torch.randn(0, 2, 1, 64, device=device, dtype=dtype, requires_grad=True)
    tables = angle_tables(torch.arange(0), 8, device)
    query, gate, *_ = _TritonSplitNormRope.apply(qkv, (16,) * 4, weight, weight, *tables, 1e-5, True)
    out = _TritonGate.apply(query.flatten(2), gate)
    _, d_weight = torch.autograd.grad(out, (qkv, weight), torch.randn_like(out))
    assert d_weight.eq(0).all()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_doors_on_a_gpu_at_full_size(dtype):
    """Programs as large as they are in training, several spans, twice the same bits."""
    sections = ((2048, 2048, 4096), (128, 128, None))
    borders = (0, 1, 100, 101, 103, 500, 500, 1000)
    rows = Rows.from_ranges(borders, ((0, 500), (500, 1000)), 1, torch.device("cuda"))
    positions = Rows.from_ranges(borders, ((0, 1000),), 1, torch.device("cpu")).positions

    def ours(x, weight):
        halo = halo_of(x, 3, 2)
        cut = x.unflatten(1, (2, -1))[0]
        outs = causal_conv1d_silu(cut, weight, rows, halo, sizes=sections[0], norm_dims=sections[1])
        return [out.flatten(0, 1).unsqueeze(0) for out in outs]

    inputs = {"x": torch.randn(1, 1000, 8192), "weight": torch.randn(8192, 4)}
    truth = lambda x, weight: conv_truth(x, weight, positions, sections)  # noqa: E731
    compare(ours, truth, inputs, ("cuda", dtype), parameters=("weight",))
    leaves = [x.cuda().to(dtype).requires_grad_() for x in inputs.values()]
    grads = [torch.autograd.grad(sum(out.sum() for out in ours(*leaves)), leaves) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
