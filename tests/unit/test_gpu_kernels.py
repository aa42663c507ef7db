"""The kernels that run on a GPU against the per-token float64 reference, in bf16."""

import pytest
import torch

from megatron_gdn.ops.causal_conv import causal_conv1d_silu
from megatron_gdn.ops.gated_delta_rule import backend_name, gated_delta_rule
from megatron_gdn.rows import Rows
from tests.helpers.cases import CONV_WIDTH, PACKINGS
from tests.helpers.compare import assert_close
from tests.helpers.reference import GDNSizes, causal_conv_reference, gated_delta_rule_reference

pytestmark = pytest.mark.gpu(1)

HEADS = GDNSizes(2, 4, 128, 128)
BF16_KERNEL = 6e-3
"""bf16 operands of tensor cores with fp32 sums: flash-linear-attention's own tests allow 2e-3 to 6e-3."""
BF16_GATES = 2e-2
"""Gates' gradients are differences of such sums."""


def on_gpu(x: torch.Tensor, dtype) -> torch.Tensor:
    return x.to("cuda", dtype).requires_grad_()


def scan_in_stream_order(summaries: torch.Tensor) -> torch.Tensor:
    """What the ranks' exchange does, for rows that are consecutive spans held in one process."""
    key_dim = summaries.shape[-2]
    state, entering = torch.zeros_like(summaries[0, ..., key_dim:]), []
    for row in summaries:
        entering.append(state)
        state = row[..., :key_dim] @ state + row[..., key_dim:]
    return torch.stack(entering)


def compare_rule(packing: str, num_spans: int):
    case = PACKINGS[packing]
    span = case.seq_len // num_spans
    shape = (case.batch, case.seq_len)
    inputs = [
        torch.randn(*shape, HEADS.num_key_heads, HEADS.key_head_dim),
        torch.randn(*shape, HEADS.num_key_heads, HEADS.key_head_dim),
        torch.randn(*shape, HEADS.num_value_heads, HEADS.value_head_dim),
        torch.randn(*shape, HEADS.num_value_heads),
        torch.randn(*shape, HEADS.num_value_heads),
    ]
    inputs = [x.bfloat16() for x in inputs] + [torch.linspace(-4, 2, 4), torch.randn(4)]
    upstream = torch.randn(*shape, HEADS.num_value_heads, HEADS.value_head_dim).bfloat16()
    exact = [x.double().requires_grad_() for x in inputs]
    want = gated_delta_rule_reference(*exact, case.positions)
    want_grads = torch.autograd.grad(want, exact, upstream.double())

    ranges = tuple((i * span, (i + 1) * span) for i in range(num_spans))
    rows = Rows.from_ranges(case.borders, ranges, case.batch, torch.device("cuda"))
    leaves = [on_gpu(x, x.dtype) for x in inputs]
    cut = [x.unflatten(1, (num_spans, span)).flatten(0, 1) for x in leaves[:5]]
    got = gated_delta_rule(*cut, *leaves[5:], rows, scan_in_stream_order if num_spans > 1 else None)
    got = got.view_as(want)
    grads = torch.autograd.grad(got, leaves, upstream.cuda())
    assert_close(f"{packing} o", got, want, BF16_KERNEL, dtype=torch.bfloat16)
    for name, grad, w in zip(("q", "k", "v", "a", "b", "A_log", "dt_bias"), grads, want_grads, strict=True):
        tolerance = BF16_KERNEL if name in "qkv" else BF16_GATES
        assert_close(f"{packing} d {name}", grad, w, tolerance, dtype=grad.dtype)


def test_bf16_runs_on_the_fast_kernel():
    """What is compared below is not the torch path."""
    assert backend_name(torch.device("cuda"), torch.bfloat16) == "fla"


@pytest.mark.parametrize("packing", PACKINGS)
def test_rule_matches_reference(packing):
    """Whole streams: documents, batches, lengths that are no multiple of a chunk."""
    compare_rule(packing, 1)


@pytest.mark.parametrize("num_spans", (2, 4))
@pytest.mark.parametrize("packing", [name for name, case in PACKINGS.items() if case.batch == 1])
def test_rule_on_spans_matches_reference(packing, num_spans):
    """The stream cut into spans that pass their state on, as chunkwise ranks do."""
    compare_rule(packing, num_spans)


@pytest.mark.parametrize("num_spans", (1, 4))
@pytest.mark.parametrize("packing", [name for name, case in PACKINGS.items() if case.batch == 1])
def test_conv_matches_reference(packing, num_spans):
    """Whole streams, and spans with what came before each of them."""
    case = PACKINGS[packing]
    span = case.seq_len // num_spans
    if span < CONV_WIDTH - 1:
        num_spans, span = 2, case.seq_len // 2
    x, weight = torch.randn(1, case.seq_len, 64).bfloat16(), torch.randn(64, CONV_WIDTH).bfloat16()
    upstream = torch.randn(1, case.seq_len, 64).bfloat16()
    exact = [t.double().requires_grad_() for t in (x, weight)]
    want = causal_conv_reference(*exact, case.positions)
    want_grads = torch.autograd.grad(want, exact, upstream.double())

    ranges = tuple((i * span, (i + 1) * span) for i in range(num_spans))
    rows = Rows.from_ranges(case.borders, ranges, 1, torch.device("cuda"))
    leaves = [on_gpu(t, torch.bfloat16) for t in (x, weight)]
    cut = leaves[0].unflatten(1, (num_spans, span)).flatten(0, 1)
    halo = None
    if num_spans > 1:
        tails = cut[:, -(CONV_WIDTH - 1) :]
        halo = torch.cat([torch.zeros_like(tails[:1]), tails[:-1]])
    got = causal_conv1d_silu(cut, leaves[1], rows, halo).view_as(want)
    grads = torch.autograd.grad(got, leaves, upstream.cuda())
    for name, g, w in zip(("y", "d x", "d weight"), (got, *grads), (want, *want_grads), strict=True):
        assert_close(f"{packing} {name}", g, w, BF16_KERNEL, dtype=torch.bfloat16)
