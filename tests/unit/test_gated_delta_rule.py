"""The torch gated delta rule and convolution against the per-token float64 reference."""

import re
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from megatron_gdn.ops import gated_delta_rule as gated_delta_rule_module
from megatron_gdn.ops.causal_conv import causal_conv1d_silu
from megatron_gdn.ops.gated_delta_rule import choose_backend, gated_delta_rule
from megatron_gdn.rows import Rows
from tests.helpers.cases import BF16_FACTOR, CONV_WIDTH, FP32_TRUTH, GVA_HEADS, PACKINGS
from tests.helpers.compare import assert_close, relative_rms
from tests.helpers.reference import causal_conv_reference, gated_delta_rule_reference
from tests.helpers.rule import NAMES, normalised, rule_inputs, with_grads

CPU = torch.device("cpu")


def rows_of(case) -> Rows:
    return Rows.from_ranges(case.borders, ((0, case.seq_len),), case.batch, CPU)


def check_float32(case, inputs):
    """Output and every gradient of the rule, gates included, in fp32."""
    upstream = torch.randn_like(inputs[2])
    want = with_grads(lambda *x: gated_delta_rule_reference(*x, case.positions), inputs, upstream)
    rows = rows_of(case)
    got = with_grads(lambda *x: gated_delta_rule(*normalised(x), rows), [x.float() for x in inputs], upstream)
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

    def ours(*leaves):
        return gated_delta_rule(*normalised(leaves, torch.float32), rows)

    got = with_grads(ours, inputs, upstream)
    for name, g, w, x in zip(("o", *NAMES), got, want, [upstream, *inputs], strict=True):
        assert g.dtype == x.dtype, name
        rounded = relative_rms(w.to(g.dtype), w) if g.dtype == torch.bfloat16 else FP32_TRUTH
        assert_close(name, g.double(), w, BF16_FACTOR * rounded)


def test_rule_documents_do_not_touch_each_other():
    """Changing one document's tokens leaves every other document's output bit-identical."""
    case, sizes = PACKINGS["many_short"], GVA_HEADS["gva2"]
    inputs = [x.float() for x in rule_inputs(case, sizes)]
    rows = rows_of(case)
    before = gated_delta_rule(*normalised(inputs), rows)
    start, end = case.cu_seqlens[10:12]
    for x in inputs[:5]:
        x[:, start:end] = torch.randn_like(x[:, start:end]) * 3
    after = gated_delta_rule(*normalised(inputs), rows)
    outside = torch.ones(case.seq_len, dtype=torch.bool)
    outside[start:end] = False
    assert torch.equal(after[:, outside], before[:, outside])
    assert not torch.equal(after[:, start:end], before[:, start:end])


def test_rule_rejects_heads_that_do_not_divide():
    """Value heads must be a multiple of key heads."""
    inputs = [x.float() for x in rule_inputs(PACKINGS["not_64"], GVA_HEADS["gva1"])]
    inputs[2] = inputs[2][:, :, :3]
    with pytest.raises(ValueError, match="--linear-num-value-heads must be a multiple"):
        gated_delta_rule(*normalised(inputs), rows_of(PACKINGS["not_64"]))


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

    def ours(x, weight):
        return causal_conv1d_silu(x, weight, rows, sizes=(24,), norm_dims=(None,))[0]

    got = with_grads(ours, [x.float() for x in inputs], upstream)
    for name, g, w in zip(("y", "d x", "d weight"), got, want, strict=True):
        assert_close(name, g, w, FP32_TRUTH, dtype=torch.float32)


BF16 = torch.bfloat16
CUDA = torch.device("cuda")
PACKAGES = {"flash-qla": "0.1.3", "tilelang": "0.1.15", "triton": "3.6.0"}


@pytest.fixture
def machine(monkeypatch):
    """A GPU and installed packages to choose by: `machine(capability, **versions)`."""

    def set_up(capability=(9, 0), **versions):
        installed = PACKAGES | {name.replace("_", "-"): v for name, v in versions.items()}

        def version(name):
            if installed.get(name) is None:
                raise PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(gated_delta_rule_module, "version", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        choose_backend.cache_clear()

    yield set_up
    choose_backend.cache_clear()


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "head_dims", "name", "reason"),
    [
        ({}, CUDA, BF16, (128, 128), "flash_qla", ""),
        ({}, CUDA, torch.float16, (128, 128), "flash_qla", ""),
        ({}, CUDA, BF16, (128, 64), "fla", "--linear-key-head-dim and --linear-value-head-dim 128"),
        ({"capability": (8, 0)}, CUDA, BF16, (128, 128), "fla", "compute capability 9.0 only, got 8.0"),
        ({"flash_qla": None}, CUDA, BF16, (128, 128), "fla", r"pip install 'megatron_gdn\[gpu\]'"),
        ({"flash_qla": "0.1.4"}, CUDA, BF16, (128, 128), "fla", "flash-qla 0.1.3"),
        ({"tilelang": None, "flash_qla": None}, CUDA, BF16, (128, 128), "torch", "Triton 3.6.0"),
        (
            {"tilelang": None, "flash_qla": None, "triton": "3.7.1"},
            CUDA,
            BF16,
            (128, 128),
            "fla",
            "flash-qla",
        ),
        ({"tilelang": None, "capability": (8, 0)}, CUDA, BF16, (128, 128), "fla", "9.0 only"),
        ({}, CUDA, torch.float32, (128, 128), "torch", "--bf16 or --fp16, got torch.float32"),
        ({}, CPU, BF16, (128, 128), "torch", "needs a CUDA device, got cpu"),
    ],
)
def test_auto_takes_the_fastest_that_can_run(machine, setting, device, dtype, head_dims, name, reason):
    """By hardware, dtype, shapes and versions; what was passed over is said with its reason."""
    machine(**setting)
    chosen = choose_backend(device, dtype, head_dims)
    assert chosen.name == name
    assert re.search(reason, str(chosen))


def test_backend_asked_for_is_taken_or_refused(machine):
    """Never another one instead."""
    machine()
    assert str(choose_backend(CUDA, BF16, (128, 128), "fla")) == "fla"
    assert str(choose_backend(CUDA, BF16, (128, 128), "torch")) == "torch"
    with pytest.raises(ValueError, match="--gdn-backend flash_qla cannot run here: it needs a CUDA device"):
        choose_backend(CPU, BF16, (128, 128), "flash_qla")
    with pytest.raises(
        ValueError, match="--gdn-backend 'flashqla' is unknown; choose one of auto, flash_qla"
    ):
        choose_backend(CUDA, BF16, (128, 128), "flashqla")
    case = PACKINGS["not_64"]
    inputs = [x.float() for x in rule_inputs(case, GVA_HEADS["gva1"])]
    with pytest.raises(ValueError, match="--gdn-backend fla cannot run here"):
        gated_delta_rule(*normalised(inputs), rows_of(case), backend="fla")
