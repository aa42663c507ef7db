"""The kernels that run on a GPU against the per-token float64 reference, in bf16."""

import pytest
import torch

from megatron_gdn.ops import gated_delta_rule_flash_qla
from megatron_gdn.ops.causal_conv import causal_conv1d_silu
from megatron_gdn.ops.gated_delta_rule import choose_backend, gated_delta_rule
from megatron_gdn.rows import Rows
from tests.helpers.cases import CONV_WIDTH, PACKINGS, Packing
from tests.helpers.compare import assert_close
from tests.helpers.reference import GDNSizes, causal_conv_reference, gated_delta_rule_reference
from tests.helpers.rule import NAMES, ScanInStreamOrder, normalised, rule_inputs, with_grads

pytestmark = pytest.mark.gpu(1)

HEADS = GDNSizes(2, 4, 128, 128)
BACKENDS = ("flash_qla", "fla", "torch")
BF16_KERNEL = 6e-3
"""bf16 operands of tensor cores with fp32 sums: flash-linear-attention's own tests allow 2e-3 to 6e-3."""
BF16_GATES = 2e-2
"""Gates' gradients are differences of such sums."""


def on_gpu(x: torch.Tensor, dtype) -> torch.Tensor:
    return x.to("cuda", dtype).requires_grad_()


def choose(backend: str) -> str:
    """`backend`, if it can run on this machine."""
    try:
        choose_backend(torch.device("cuda"), torch.bfloat16, HEADS[2:], backend)
    except ValueError as why:
        pytest.skip(str(why))
    return backend


def run_on_spans(backend: str, inputs, upstream, borders, num_spans: int) -> list[torch.Tensor]:
    """Output and gradients of the rule on the stream cut into spans that pass their state on."""
    batch, seq_len = upstream.shape[:2]
    span = seq_len // num_spans
    ranges = tuple((i * span, (i + 1) * span) for i in range(num_spans))
    rows = Rows.from_ranges(borders, ranges, batch, torch.device("cuda"))
    exchange = ScanInStreamOrder() if num_spans > 1 else None

    def ours(*leaves):
        cut = [x.unflatten(1, (num_spans, span)).flatten(0, 1) for x in normalised(leaves)[:5]]
        return gated_delta_rule(*cut, *leaves[5:], rows, exchange, backend).view_as(upstream)

    return with_grads(ours, inputs, upstream)


def check_bf16(where: str, got, want) -> None:
    """Output, gradients of q, k, v and of what makes the gates."""
    for name, g, w in zip(("o", *NAMES), got, want, strict=True):
        tolerance = BF16_KERNEL if name in ("o", "q", "k", "v") else BF16_GATES
        assert_close(f"{where} {name}", g, w, tolerance, dtype=g.dtype)


def compare_rule(backend: str, packing: str, num_spans: int):
    """Against the reference, token by token in float64."""
    case = PACKINGS[packing]
    inputs = [x.bfloat16() if i < 5 else x.float() for i, x in enumerate(rule_inputs(case, HEADS))]
    upstream = torch.randn(inputs[2].shape).bfloat16()
    exact = [x.double() for x in inputs]
    want = with_grads(lambda *x: gated_delta_rule_reference(*x, case.positions), exact, upstream)
    got = run_on_spans(backend, [x.cuda() for x in inputs], upstream.cuda(), case.borders, num_spans)
    check_bf16(packing, got, want)


def test_bf16_runs_on_a_fast_kernel():
    """`auto` is not the torch path."""
    assert choose_backend(torch.device("cuda"), torch.bfloat16, HEADS[2:]).name != "torch"


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rule_matches_reference(backend, packing):
    """Whole streams: documents, batches, lengths that are no multiple of a chunk."""
    compare_rule(choose(backend), packing, 1)


@pytest.mark.parametrize("num_spans", (2, 4))
@pytest.mark.parametrize("packing", [name for name, case in PACKINGS.items() if case.batch == 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rule_on_spans_matches_reference(backend, packing, num_spans):
    """The stream cut into spans that pass their state on, as chunkwise ranks do."""
    compare_rule(choose(backend), packing, num_spans)


LONG = {
    "one document": (0, 8192),
    "documents": (0, 100, 3000, 3001, 7000, 8192),
}


@pytest.mark.parametrize("num_spans", (1, 2, 4, 8))
@pytest.mark.parametrize("borders", LONG.values(), ids=LONG)
@pytest.mark.parametrize("backend", ("flash_qla", "fla"))
def test_rule_on_long_spans_matches_torch(backend, borders, num_spans):
    """Pieces long enough to be cut into parts, heads that hardly forget, against the fp32 torch rule."""
    choose(backend)
    inputs = rule_inputs(Packing(8192), HEADS)
    inputs[5] -= torch.tensor([4.0, 2.0, 1.0, 0.0]).double()
    inputs = [x.bfloat16().cuda() if i < 5 else x.float().cuda() for i, x in enumerate(inputs)]
    upstream = torch.randn_like(inputs[2])
    exact, exact_up = [x.float() for x in inputs], upstream.float()
    want = run_on_spans("torch", exact, exact_up, borders, 1)
    got = run_on_spans(backend, inputs, upstream, borders, num_spans)
    check_bf16(f"{num_spans} spans", got, want)


def test_flash_qla_cuts_long_pieces():
    """What is compared above does use several parts per piece."""
    choose("flash_qla")
    rows = Rows.from_ranges(LONG["one document"], ((2048, 4096),), 1, torch.device("cuda"))
    assert gated_delta_rule_flash_qla._partition(rows, HEADS.num_value_heads).split


@pytest.mark.parametrize("num_spans", (1, 4))
@pytest.mark.parametrize("backend", ("flash_qla", "fla"))
def test_only_the_first_layer_waits_for_the_gpu(backend, num_spans):
    """What the host has to know of a microbatch is made once; later layers never copy from the device."""
    choose(backend)
    borders, span = LONG["documents"], 8192 // num_spans
    ranges = tuple((i * span, (i + 1) * span) for i in range(num_spans))
    rows = Rows.from_ranges(borders, ranges, 1, torch.device("cuda"))
    inputs = [
        x.bfloat16().cuda() if i < 5 else x.float().cuda()
        for i, x in enumerate(rule_inputs(Packing(8192), HEADS))
    ]
    inputs = [x.unflatten(1, (num_spans, span)).flatten(0, 1) if i < 5 else x for i, x in enumerate(inputs)]
    exchange = ScanInStreamOrder() if num_spans > 1 else None

    def layer(*leaves):
        return gated_delta_rule(*normalised(leaves), rows, exchange, backend)

    upstream = torch.randn_like(inputs[2])
    first = with_grads(layer, inputs, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = with_grads(layer, inputs, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, g, w in zip(("o", *NAMES), second, first, strict=True):
        assert_close(name, g, w, BF16_KERNEL)


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
    (got,) = causal_conv1d_silu(cut, leaves[1], rows, halo, sizes=(64,), norm_dims=(None,))
    got = got.view_as(want)
    grads = torch.autograd.grad(got, leaves, upstream.cuda())
    for name, g, w in zip(("y", "d x", "d weight"), (got, *grads), (want, *want_grads), strict=True):
        assert_close(f"{packing} {name}", g, w, BF16_KERNEL, dtype=torch.bfloat16)
