"""How fast is an MoE layer without TransformerEngine, beside the host's, whose experts run one by one?

python -m tests.benchmarks.moe_layer    on a GPU, from the root of the repository; writes results/moe_layer.md

Exit status 1 if a bound is missed.
"""

import sys
from collections.abc import Callable

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
from tests.benchmarks.gpu import machine, matmul_tflops, milliseconds, one_rank, peak_gib
from tests.benchmarks.report import RESULTS, provenance, table

TOKENS = 32_768
TIMES_FASTER = 5.0
SHARE_OF_MATMUL = 0.40


def config() -> Qwen35Config:
    """The MoE layer of Qwen3.5 35B-A3B, as `pretrain_qwen35.py` configures it."""
    return Qwen35Config.from_size(
        "35b-a3b",
        params_dtype=torch.bfloat16,
        bf16=True,
        bias_activation_fusion=True,
        transformer_impl="local",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def build(groups, host: bool) -> torch.nn.Module:
    """Our layer, or the host's without TransformerEngine."""
    if host:
        spec = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=256)
    else:
        spec = moe_layer_spec(config(), LocalBackend(), local=True)
    layer = spec(config=config(), pg_collection=groups, is_mtp_layer=False)
    layer.set_layer_number(1)
    return layer.cuda().bfloat16()


def step(layer: torch.nn.Module, tokens: Tensor, upstream: Tensor) -> Callable[[], None]:
    """Forward and backward, gradients given up."""

    def run() -> None:
        layer.zero_grad()
        tokens.grad = None
        layer(tokens)[0].backward(upstream)

    return run


def flops(cfg: Qwen35Config) -> float:
    """Of the matrix products of one forward and backward, routed and shared experts and router."""
    routed = 3 * cfg.hidden_size * cfg.moe_ffn_hidden_size * cfg.moe_router_topk
    shared = 3 * cfg.hidden_size * cfg.moe_shared_expert_intermediate_size
    return 6 * TOKENS * (routed + shared + cfg.hidden_size * cfg.num_moe_experts)


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
    weights = torch.rand(len(permuted), device="cuda", requires_grad=True)
    active = weighted_swiglu(hidden, weights).detach().requires_grad_()

    def both(function: Callable[[], Tensor], *leaves: Tensor) -> tuple[float, float]:
        output = function()
        upstream = torch.randn_like(output)
        with torch.no_grad():
            forward = milliseconds(function)
        backward = milliseconds(
            lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True), repeats=10
        )
        return forward, backward

    shared = layer.shared_experts
    return {
        "router": both(lambda: layer.router(tokens)[0], tokens, layer.router.weight),
        "sort by expert": (milliseconds(lambda: sort_by_expert(routing_map, topk)), 0.0),
        "tokens to experts": both(lambda: sum_rows(x, token, rows), x),
        "fc1": both(lambda: grouped_linear(permuted, fc1, ends), permuted, fc1),
        "SwiGLU": both(lambda: weighted_swiglu(hidden, weights), hidden, weights),
        "fc2": both(lambda: grouped_linear(active, fc2, ends), active, fc2),
        "and back": both(lambda: sum_rows(permuted, rows, token), permuted),
        "shared expert": both(lambda: shared(tokens), tokens, *shared.parameters()),
    }


def main() -> int:
    """Measure, print and write the tables."""
    with one_rank() as groups:
        return measure(groups)


def measure(groups) -> int:
    """The tables, on one rank's groups."""
    tokens = torch.randn(TOKENS, 1, 2048, device="cuda", dtype=torch.bfloat16).requires_grad_()
    upstream = torch.randn_like(tokens)
    ceiling, work = matmul_tflops(), flops(config()) / 1e9
    times, peaks = {}, {}
    for name, host in (("ours", False), ("host", True)):
        layer = build(groups, host)
        run = step(layer, tokens, upstream)
        times[name] = milliseconds(run, repeats=10, warm_up=5)
        layer.zero_grad()
        peaks[name] = peak_gib(run)
        print(f"{name}: {times[name]:.2f} ms, {peaks[name]:.2f} GiB", flush=True)
        if not host:
            split = parts(layer, tokens)
        del layer, run
        torch.cuda.empty_cache()
    rates = {name: work / ms for name, ms in times.items()}
    rows = [
        [name, f"{ms:.2f}", f"{rates[name]:.0f}", f"{rates[name] / ceiling:.0%}", f"{peaks[name]:.1f}"]
        for name, ms in times.items()
    ]
    faster = times["host"] / times["ours"]
    missed = faster < TIMES_FASTER or rates["ours"] / ceiling < SHARE_OF_MATMUL
    text = "\n".join(
        [
            "# The MoE layer without TransformerEngine",
            "",
            f"{TOKENS:,} tokens of 2048 in bf16, 256 experts of 512, 8 for each token, a shared expert; "
            "forward and backward of the whole layer with its router, one rank. Host: megatron-core's layer "
            "with its local backend, one expert after another. Peak: beyond weights and input, with weight "
            "gradients. "
            f"Bounds: at least {TIMES_FASTER:g} times the host's speed ({faster:.1f} here), at least "
            f"{SHARE_OF_MATMUL:.0%} of the matmul rate measured in this run ({ceiling:.0f} TFLOP/s).",
            "",
            *provenance("python -m tests.benchmarks.moe_layer"),
            *machine(),
            "",
            table(["layer", "ms", "TFLOP/s", "of the matmul rate", "peak, GiB"], rows),
            "Where ours spends it, each part alone, its weights' gradients included:",
            "",
            table(
                ["part", "forward, ms", "backward, ms"],
                [[name, f"{f:.2f}", f"{b:.2f}"] for name, (f, b) in split.items()],
            ),
        ]
    )
    print(text)
    (RESULTS / "moe_layer.md").write_text(text)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
