"""The self-test finds a kernel that is wrong, names it, and lets pass what is right."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_gdn.config import Qwen35Config
from megatron_gdn.ops import (
    attention_torch,
    causal_conv,
    gated_delta_rule_torch,
    grouped_gemm,
    linear_cross_entropy,
    norms,
    output_gate,
    qk_norm_rope,
    router_logits,
    row_sums,
    swiglu,
)
from megatron_gdn.self_test import runner
from megatron_gdn.self_test.cases import Setup
from megatron_gdn.self_test.runner import CHECKS, TOLERANCES, compare, run_check, run_checks

CPU = torch.device("cpu")
BY_NAME = {check.name: check for check in CHECKS}


def setup_for(dtype: torch.dtype = torch.float32, size: str = "debug", mode=None, packed=None, **overrides):
    overrides = {
        "transformer_impl": "local",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    } | overrides
    return Setup.of(Qwen35Config.from_size(size, **overrides), CPU, mode, packed)


class _Scaled(torch.autograd.Function):
    """x, with a gradient that is off by a thousandth."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001


def wrong_gradient(place: int):
    """A kernel whose result is right and whose gradient of one argument is not."""

    def break_(function):
        def broken(*x):
            return function(*x[:place], _Scaled.apply(x[place]), *x[place + 1 :])

        return broken

    return break_


def scaled_result(place: int):
    """A backward pass one of whose results is off by a thousandth."""

    def break_(function):
        def broken(*args):
            results = list(function(*args))
            results[place] = results[place] * 1.001
            return tuple(results)

        return broken

    return break_


# check: (module, its kernel, how it is broken, what the self-test must name)
BROKEN = {
    "gated delta rule, documents": (
        gated_delta_rule_torch, "run", wrong_gradient(3), "gradient of (a|A_log|dt_bias)",
    ),
    "gated delta rule with states passed on, one document": (
        gated_delta_rule_torch, "run", wrong_gradient(1), "gradient of k",
    ),
    "convolution, one document": (causal_conv, "_torch_conv", wrong_gradient(1), "gradient of weight"),
    "attention, documents": (attention_torch, "backward", scaled_result(1), "gradient of k"),
    "attention to earlier spans, one document": (
        attention_torch, "backward", scaled_result(2), "gradient of v",
    ),
    "queries and keys": (qk_norm_rope, "apply_rope", wrong_gradient(0), "gradient of the queries' weight"),
    "output gate": (output_gate, "gate_output", wrong_gradient(1), "gradient of gate"),
    "norm": (norms, "rms_norm", wrong_gradient(1), "gradient of weight"),
    "gated norm": (norms, "gated_rms_norm", wrong_gradient(1), "gradient of gate"),
    "rows of experts": (row_sums, "sum_rows", wrong_gradient(0), "gradient of x"),
    "SwiGLU of experts": (swiglu, "_backward", scaled_result(1), "gradient of weight"),
    "products of experts": (grouped_gemm, "grouped_linear", wrong_gradient(1), "gradient of weight"),
    "loss": (linear_cross_entropy, "vocab_gradients", scaled_result(0), "gradient of hidden"),
}  # fmt: skip


@pytest.mark.parametrize("check", BROKEN)
def test_finds_a_wrong_gradient(monkeypatch, check):
    """One gradient off by a thousandth in fp32 is found and named; without that all is right."""
    module, name, break_, words = BROKEN[check]
    right = run_check(BY_NAME[check], setup_for())
    assert right.problem is None
    monkeypatch.setattr(module, name, break_(getattr(module, name)))
    wrong = run_check(BY_NAME[check], setup_for())
    assert wrong.error > 1 > right.error
    assert re.search(f"FAILED: relative error .* in the {words}", wrong.problem)
    assert check in str(wrong)


@pytest.mark.parametrize("check", [name for name in BY_NAME if "router" in name or "conv" in name])
def test_bf16_is_right_and_a_wrong_gradient_is_found(monkeypatch, check):
    """The tolerance of bf16 lets rounding pass, and not an error of a twentieth."""
    setup = setup_for(torch.bfloat16)
    assert run_check(BY_NAME[check], setup).problem is None
    monkeypatch.setattr(_Scaled, "backward", staticmethod(lambda ctx, grad: grad * 1.05))
    module, name = (router_logits, "router_logits") if check == "router" else (causal_conv, "_torch_conv")
    monkeypatch.setattr(module, name, wrong_gradient(0)(getattr(module, name)))
    assert "FAILED: relative error 5.0e-02 in the gradient of" in run_check(BY_NAME[check], setup).problem


def test_documents_that_are_ignored_are_found(monkeypatch):
    """A kernel that knows nothing of documents is right on one and wrong on several."""
    run = gated_delta_rule_torch.run

    def ignores(q, k, v, g, beta, rows, exchange):
        return run(q, k, v, g, beta, replace(rows, borders=((0, rows.row_len),) * rows.num_rows), exchange)

    monkeypatch.setattr(gated_delta_rule_torch, "run", ignores)
    assert run_check(BY_NAME["gated delta rule, one document"], setup_for()).problem is None
    assert "FAILED" in run_check(BY_NAME["gated delta rule, documents"], setup_for()).problem


def test_a_kernel_that_raises_is_a_failure(monkeypatch):
    """Told by the kind of exception and its first line; the next check runs."""

    def raises(*_):
        raise ImportError("install tilelang\nand read on")

    monkeypatch.setattr(norms, "rms_norm", raises)
    monkeypatch.setattr(runner, "CHECKS", (BY_NAME["norm"], BY_NAME["SwiGLU of experts"]))
    results = list(run_checks(setup_for()))
    assert results[0].problem == "FAILED: ImportError: install tilelang"
    assert results[1].problem is None


def test_a_kernel_asked_for_that_cannot_run_is_a_failure():
    """With the reason that the door gives."""
    result = run_check(BY_NAME["gated delta rule, documents"], setup_for(gdn_backend="fla"))
    assert "--gdn-backend fla cannot run here: it needs a CUDA device" in result.problem


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (torch.tensor([1.0, float("nan")]), "relative error inf"),
        (torch.tensor([1.0, float("inf")]), "relative error inf"),
        (torch.zeros(2), "relative error 1.0e+00"),
        (torch.ones(1, 2), r"shape (1, 2), not (2,)"),
        (torch.ones(2) * (1 + 2 * TOLERANCES[torch.float32]), "at most 1.0e-05"),
    ],
)
def test_compare_finds(got: Tensor, words: str):
    """What is not finite, nothing, of another shape, or not exact enough."""
    error, problem = compare(["the output"], [got], [torch.ones(2).double()], torch.float32)
    assert error > 1
    assert words in problem


def test_zero_where_zero_is_right_passes():
    """No division of nothing by nothing."""
    assert compare(["x"], [torch.zeros(2)], [torch.zeros(2).double()], torch.float32) == (0.0, None)


def test_only_what_a_run_uses_is_tested():
    """By layer spec, documents, context parallelism and experts."""

    def names(setup):
        return {check.name for check in CHECKS if check.applies(setup)}

    everything = names(setup_for(torch.bfloat16))
    assert everything == set(BY_NAME)
    headwise = names(setup_for(mode="headwise", packed=True, context_parallel_size=2))
    assert not any("passed on" in name or "one document" in name for name in headwise)
    assert {"gated delta rule, documents", "attention to earlier spans, documents", "loss"} < headwise
    chunkwise = names(setup_for(mode="chunkwise", packed=False, context_parallel_size=2))
    assert "gated delta rule with states passed on, one document" in chunkwise
    assert not any("documents" in name for name in chunkwise)
    alone = names(setup_for(mode="chunkwise", packed=False))
    assert not any("passed on" in name or "earlier" in name for name in alone)
    assert not any("expert" in name or name == "router" for name in names(setup_for(size="0.8b")))
    engine = SimpleNamespace(**vars(Qwen35Config.from_size("debug")))
    engine.transformer_impl = "transformer_engine"
    assert not any("expert" in name for name in names(Setup.of(engine, CPU, None, None)))


def test_heads_are_those_of_a_rank():
    """Shared out over tensor-parallel ranks, and with headwise over context-parallel ranks too."""
    sizes = {"size": "35b-a3b", "packed": True, "tensor_model_parallel_size": 2, "context_parallel_size": 8}
    headwise, chunkwise = (setup_for(mode=mode, **sizes) for mode in ("headwise", "chunkwise"))
    assert (headwise.key_heads, headwise.value_heads, headwise.heads, headwise.kv_heads) == (1, 2, 8, 1)
    assert (chunkwise.key_heads, chunkwise.value_heads) == (8, 16)


def test_random_state_stays():
    """Training starts from the same random numbers with and without the self-test."""
    state = torch.get_rng_state()
    for name in ("products of experts", "loss"):
        assert run_check(BY_NAME[name], setup_for()).problem is None
    assert torch.equal(torch.get_rng_state(), state)
