"""The torch gated delta rule and convolution against the per-token float64 reference."""

import pytest
import torch

from megatron_gdn.ops.causal_conv import causal_conv1d_silu
from megatron_gdn.ops.gated_delta_rule import gated_delta_rule
from megatron_gdn.rows import Rows
from tests.helpers.cases import BF16_FACTOR, CONV_WIDTH, FP32_TRUTH, GVA_HEADS, PACKINGS
from tests.helpers.compare import assert_close, relative_rms
from tests.helpers.reference import causal_conv_reference, gated_delta_rule_reference

CPU = torch.device("cpu")
NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias")


def rule_inputs(case, sizes) -> list[torch.Tensor]:
    """Random q, k, v, a, b, A_log, dt_bias in float64, exact in float32, decay from weak to strong."""
    h, H, K, V = sizes
    shape = (case.batch, case.seq_len)
    return [
        torch.randn(*shape, h, K).double(),
        torch.randn(*shape, h, K).double(),
        torch.randn(*shape, H, V).double(),
        torch.randn(*shape, H).double(),
        torch.randn(*shape, H).double(),
        torch.linspace(-4, 2.7, H).double(),
        torch.randn(H).double(),
    ]


def with_grads(function, inputs, upstream):
    """Output and the gradient of every input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def rows_of(case) -> Rows:
    return Rows.from_ranges(case.borders, ((0, case.seq_len),), case.batch, CPU)


def check_float32(case, inputs):
    """Output and every gradient of the rule, gates included, in fp32."""
    upstream = torch.randn_like(inputs[2])
    want = with_grads(lambda *x: gated_delta_rule_reference(*x, case.positions), inputs, upstream)
    rows = rows_of(case)
    got = with_grads(lambda *x: gated_delta_rule(*x, rows), [x.float() for x in inputs], upstream)
    for name, g, w in zip(("o", *(f"d {n}" for n in NAMES)), got, want, strict=True):
        assert_close(name, g, w, FP32_TRUTH, dtype=torch.float32)


@pytest.mark.parametrize("heads", GVA_HEADS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_rule_matches_reference(packing, heads):
    """Every packing and ratio of heads, decay from weak to strong."""
    case = PACKINGS[packing]
    check_float32(case, rule_inputs(case, GVA_HEADS[heads]))


def test_rule_strong_decay_keeps_gate_gradients():
    """Decay of up to exp(-20) per token, as at initialisation (A in 1..16): gates' gradients stay exact.

    Differences of cumulative sums lose three digits of dA_log here.
    """
    case = PACKINGS["several_chunks"]
    inputs = rule_inputs(case, GVA_HEADS["gva2"])
    inputs[5] = torch.linspace(1, 16, 8).log().double()
    inputs[6] = torch.ones(8).double()
    check_float32(case, inputs)


def test_rule_bf16_is_as_good_as_the_reference_in_bf16_inputs():
    """bf16 in and out, fp32 inside: at most twice the error of rounding the reference's results once."""
    case, sizes = PACKINGS["borders_off_spans"], GVA_HEADS["gva2"]
    inputs = [x.bfloat16() if i < 5 else x.float() for i, x in enumerate(rule_inputs(case, sizes))]
    upstream = torch.randn(1, case.seq_len, sizes.num_value_heads, sizes.value_head_dim).bfloat16()
    exact_in = [x.double() for x in inputs]
    want = with_grads(lambda *x: gated_delta_rule_reference(*x, case.positions), exact_in, upstream)
    rows = rows_of(case)
    got = with_grads(lambda *x: gated_delta_rule(*x, rows), inputs, upstream)
    for name, g, w, x in zip(("o", *NAMES), got, want, [upstream, *inputs], strict=True):
        assert g.dtype == x.dtype, name
        rounded = relative_rms(w.to(g.dtype), w) if g.dtype == torch.bfloat16 else FP32_TRUTH
        assert_close(name, g.double(), w, BF16_FACTOR * rounded)


def test_rule_documents_do_not_touch_each_other():
    """Changing one document's tokens leaves every other document's output bit-identical."""
    case, sizes = PACKINGS["many_short"], GVA_HEADS["gva2"]
    inputs = [x.float() for x in rule_inputs(case, sizes)]
    rows = rows_of(case)
    before = gated_delta_rule(*inputs, rows)
    start, end = case.cu_seqlens[10:12]
    for x in inputs[:5]:
        x[:, start:end] = torch.randn_like(x[:, start:end]) * 3
    after = gated_delta_rule(*inputs, rows)
    outside = torch.ones(case.seq_len, dtype=torch.bool)
    outside[start:end] = False
    assert torch.equal(after[:, outside], before[:, outside])
    assert not torch.equal(after[:, start:end], before[:, start:end])


def test_rule_rejects_heads_that_do_not_divide():
    """Value heads must be a multiple of key heads."""
    inputs = [x.float() for x in rule_inputs(PACKINGS["not_64"], GVA_HEADS["gva1"])]
    inputs[2] = inputs[2][:, :, :3]
    with pytest.raises(ValueError, match="--linear-num-value-heads must be a multiple"):
        gated_delta_rule(*inputs, rows_of(PACKINGS["not_64"]))


@pytest.mark.parametrize("packing", PACKINGS)
def test_conv_matches_reference(packing):
    """Output and gradients of input and taps; no tap crosses a document border."""
    case = PACKINGS[packing]
    inputs = [
        torch.randn(case.batch, case.seq_len, 24).double(),
        torch.randn(24, CONV_WIDTH).double(),
    ]
    upstream = torch.randn(case.batch, case.seq_len, 24).double()
    want = with_grads(lambda x, w: causal_conv_reference(x, w, case.positions), inputs, upstream)
    rows = rows_of(case)
    got = with_grads(lambda x, w: causal_conv1d_silu(x, w, rows), [x.float() for x in inputs], upstream)
    for name, g, w in zip(("y", "d x", "d weight"), got, want, strict=True):
        assert_close(name, g, w, FP32_TRUTH, dtype=torch.float32)
