"""How fast is an MoE layer without TransformerEngine, beside the host's, whose experts run one by one?

python -m tests.benchmarks.moe_layer    on a GPU, from the root of the repository; writes results/moe_layer.md

Exit status 1 if a bound is missed.
"""

import sys
from collections.abc import Callable, Sequence

from tests.benchmarks import runs  # isort: split

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from torch import Tensor

from megatron_gdn.config import Qwen35Config
from megatron_gdn.layer_specs import LocalBackend
from megatron_gdn.moe_layer import moe_layer_spec, sort_by_expert
from megatron_gdn.ops.grouped_gemm import grouped_linear
from megatron_gdn.ops.row_sums import sum_rows
from megatron_gdn.ops.swiglu import weighted_swiglu

TOKENS = 32_768
TIMES_FASTER = 5.0
SHARE_OF_MATMUL = 0.40


def config(tiny: bool) -> Qwen35Config:
    """The MoE layer of Qwen3.5 35B-A3B, as `pretrain_qwen35.py` configures it."""
    return runs.model_config(
        tiny,
        bias_activation_fusion=True,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        **({"num_moe_experts": 8} if tiny else {}),
    )


def build(cfg: Qwen35Config, groups, host: bool) -> torch.nn.Module:
    """Our layer, or the host's without TransformerEngine."""
    if host:
        spec = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=cfg.num_moe_experts)
    else:
        spec = moe_layer_spec(cfg, LocalBackend(), local=True)
    layer = spec(config=cfg, pg_collection=groups, is_mtp_layer=False)
    layer.set_layer_number(1)
    return layer.to(runs.DEVICE).bfloat16()


def step(layer: torch.nn.Module, tokens: Tensor, upstream: Tensor) -> Callable[[], None]:
    """Forward and backward, gradients given up."""

    def run() -> None:
        layer.zero_grad()
        tokens.grad = None
        layer(tokens)[0].backward(upstream)

    return run


def flops(cfg: Qwen35Config, tokens: int) -> float:
    """Of the matrix products of one forward and backward, routed and shared experts and router."""
    routed = 3 * cfg.hidden_size * cfg.moe_ffn_hidden_size * cfg.moe_router_topk
    shared = 3 * cfg.hidden_size * cfg.moe_shared_expert_intermediate_size
    return 6 * tokens * (routed + shared + cfg.hidden_size * cfg.num_moe_experts)


def parts(layer: torch.nn.Module, tokens: Tensor) -> dict[str, tuple[float, float]]:
    """Milliseconds of each part, forward and backward, on the rows of a real routing."""
    cfg = layer.config
    with torch.no_grad():
        probs, routing_map = layer.router(tokens)
    topk, x = cfg.moe_router_topk, tokens.detach().flatten(0, 1).requires_grad_()
    token, _, rows = sort_by_expert(routing_map, topk)
    token, ends = token.unsqueeze(1), routing_map.sum(0).cumsum(0, dtype=torch.int32)
    fc1, fc2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    permuted = x.detach()[token.squeeze(1)].requires_grad_()
    hidden = grouped_linear(permuted, fc1, ends).detach().requires_grad_()
    weights = torch.rand(len(permuted), device=runs.DEVICE, requires_grad=True)
    active = weighted_swiglu(hidden, weights).detach().requires_grad_()

    def both(function: Callable[[], Tensor], *leaves: Tensor) -> tuple[float, float]:
        output = function()
        upstream = torch.randn_like(output)
        with torch.no_grad():
            forward = runs.milliseconds(function, repeats=10)
        backward = runs.milliseconds(
            lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True), repeats=10
        )
        return forward, backward

    shared = layer.shared_experts
    return {
        "router": both(lambda: layer.router(tokens)[0], tokens, layer.router.weight),
        "sort by expert": (runs.milliseconds(lambda: sort_by_expert(routing_map, topk)), 0.0),
        "tokens to experts": both(lambda: sum_rows(x, token, rows), x),
        "fc1": both(lambda: grouped_linear(permuted, fc1, ends), permuted, fc1),
        "SwiGLU": both(lambda: weighted_swiglu(hidden, weights), hidden, weights),
        "fc2": both(lambda: grouped_linear(active, fc2, ends), active, fc2),
        "and back": both(lambda: sum_rows(permuted, rows, token), permuted),
        "shared expert": both(lambda: shared(tokens), tokens, *shared.parameters()),
    }


def measure(report: runs.LiveReport, tiny: bool, tflops: float, groups) -> list[str]:
    """Both layers, then ours part by part; returns the bounds missed."""
    cfg, count = config(tiny), 64 if tiny else TOKENS
    tokens = torch.randn(count, 1, cfg.hidden_size, device=runs.DEVICE, dtype=torch.bfloat16)
    upstream, tokens = torch.randn_like(tokens), tokens.requires_grad_()
    work, times, split = flops(cfg, count) / 1e9, {}, {}
    report.table(f"{count:,} tokens", ["layer", "ms", "TFLOP/s", "of the matmul rate", "peak, GiB"])
    for name, host in (("ours", False), ("host", True)):
        layer = build(cfg, groups, host)
        run = step(layer, tokens, upstream)
        times[name] = runs.milliseconds(run, repeats=10, warm_up=5)
        layer.zero_grad()
        rate = work / times[name]
        peak = f"{runs.peak_gib(run):.1f}"
        report.row(name, f"{times[name]:.2f}", f"{rate:.0f}", f"{rate / tflops:.0%}", peak)
        if not host:
            split = parts(layer, tokens)
        del layer, run
        runs.empty_cache()
    title = "Where ours spends it, each part alone, its weights' gradients included"
    report.table(title, ["part", "forward, ms", "backward, ms"])
    for name, (forward, backward) in split.items():
        report.row(name, f"{forward:.2f}", f"{backward:.2f}")
    missed, faster, share = [], times["host"] / times["ours"], work / times["ours"] / tflops
    if faster < TIMES_FASTER:
        missed.append(f"{faster:.1f} times the host's speed, wanted {TIMES_FASTER:g}")
    if share < SHARE_OF_MATMUL:
        missed.append(f"{share:.0%} of the matmul rate, wanted {SHARE_OF_MATMUL:.0%}")
    return missed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the tables."""
    arguments = runs.read_arguments(__doc__, argv)
    ceilings = runs.Ceilings.measure()
    report = runs.LiveReport(
        arguments.results,
        "moe_layer",
        "# The MoE layer without TransformerEngine",
        "",
        "256 experts of 512 on tokens of 2048 in bf16, 8 for each token, a shared expert; forward and "
        "backward of the whole layer with its router, one rank. Host: megatron-core's layer with its local "
        "backend, one expert after another. Peak: beyond weights and input, with weight gradients. "
        f"Bounds: at least {TIMES_FASTER:g} times the host's speed, at least {SHARE_OF_MATMUL:.0%} of the "
        "matmul rate.",
        "",
        ceilings.text(),
    )
    with runs.one_rank() as groups:
        missed = measure(report, arguments.tiny, ceilings.tflops, groups)
    return report.verdict(missed, "both bounds are kept")


if __name__ == "__main__":
    sys.exit(main())
