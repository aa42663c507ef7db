"""How fast is a loss without whole logits, and how much memory does it take, beside losses with them?

python -m tests.benchmarks.linear_cross_entropy    on a GPU, from the root of the repository; writes
results/linear_cross_entropy.md

Exit status 1 if a bound is missed or the gradients differ from the host's.
"""

import sys
from collections.abc import Callable, Sequence

from tests.benchmarks import runs  # isort: split

import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from torch import Tensor

from megatron_gdn.output_layer import OutputLayer

TOKENS, HIDDEN, VOCAB = 32_768, 2048, 248_320
TIMES = 1.1
EXTRA_GIB = 4.0
SAME = 2e-2
"""Relative error of bf16 gradients."""


def layers(
    groups, sizes: tuple[int, int, int], loss_mask: Tensor
) -> tuple[dict[str, Callable[[Tensor, Tensor], Tensor]], Tensor]:
    """Hidden states and labels to losses [B, s], by name; and the one weight of all."""
    _, hidden_size, vocab_size = sizes
    cfg = runs.model_config(tiny=False, hidden_size=hidden_size)
    made = [
        kind(hidden_size, vocab_size, config=cfg, init_method=cfg.init_method, bias=False, tp_group=groups.tp)
        for kind in (OutputLayer, ColumnParallelLinear)
    ]
    ours, host = (layer.to(runs.DEVICE) for layer in made)
    host.weight = ours.weight

    def whole(cross_entropy: Callable) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda hidden, labels: cross_entropy(host(hidden)[0], labels.t().contiguous(), groups.tp).t()

    def unfused(logits: Tensor, labels: Tensor, group) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels, tp_group=group)

    return {
        "ours": lambda hidden, labels: ours(hidden, labels=labels, loss_mask=loss_mask)[0],
        "ours, any upstream gradient": lambda hidden, labels: ours(hidden, labels=labels)[0],
        "host": whole(unfused),
        "host, --cross-entropy-loss-fusion": whole(fused_vocab_parallel_cross_entropy),
    }, ours.weight


def measure(report: runs.LiveReport, sizes: tuple[int, int, int], tflops: float, groups) -> list[str]:
    """Time all, compare their gradients; returns the bounds missed."""
    tokens, hidden_size, vocab_size = sizes
    hidden = torch.randn(tokens, 1, hidden_size, device=runs.DEVICE, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(vocab_size, (1, tokens), device=runs.DEVICE)
    loss_mask = (torch.rand(1, tokens, device=runs.DEVICE) > 0.1).float()
    upstream = loss_mask / loss_mask.sum()
    functions, weight = layers(groups, sizes, loss_mask)
    # The gradients themselves are needed whatever the method.
    gradients = (hidden.nbytes + weight.nbytes) / 2**30
    floor = 6 * tokens * hidden_size * vocab_size / tflops / 1e9
    times, peaks, results = {}, {}, {}
    report.table(
        f"{tokens:,} tokens", ["loss", "forward, ms", "both, ms", "over ours", "over the ceiling", "GiB"]
    )
    for name, function in functions.items():

        def run(function: Callable = function) -> None:
            hidden.grad = weight.grad = None
            function(hidden, labels).backward(upstream)

        times[name] = runs.milliseconds(run)
        with torch.no_grad():
            forward = runs.milliseconds(lambda f=function: f(hidden, labels))
        results[name] = [hidden.grad.float().cpu(), weight.grad[::97].float().cpu()]
        hidden.grad = weight.grad = None
        peaks[name] = runs.peak_gib(run) - gradients
        runs.empty_cache()
        over_ours, over_floor = times[name] / times["ours"], times[name] / floor
        figures = (forward, times[name], over_ours, over_floor, peaks[name])
        report.row(name, *(f"{x:.1f}" for x in figures[:2]), *(f"{x:.2f}" for x in figures[2:]))
    for name, grads in results.items():
        for got, want in zip(grads, results["host"], strict=True):
            if not (error := runs.relative_error(got, want)) < SAME:
                raise RuntimeError(f"the gradients of {name} differ from the host's by {error:.1e}")
    return missed_bounds(times, peaks)


def missed_bounds(times: dict[str, float], peaks: dict[str, float]) -> list[str]:
    """What falls short of what this table must show, in words."""
    missed, best = [], min(ms for name, ms in times.items() if name.startswith("host"))
    if times["ours"] > TIMES * best:
        missed.append(f"{times['ours'] / best:.2f} times the faster host, wanted {TIMES:g} at most")
    if peaks["ours"] > EXTRA_GIB:
        missed.append(f"{peaks['ours']:.2f} GiB, wanted {EXTRA_GIB:g} at most")
    return missed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the table."""
    arguments = runs.read_arguments(__doc__, argv)
    sizes = (64, 32, 256) if arguments.tiny else (TOKENS, HIDDEN, VOCAB)
    ceilings = runs.Ceilings.measure()
    report = runs.LiveReport(
        arguments.results,
        "linear_cross_entropy",
        "# The loss without whole logits",
        "",
        f"Hidden states of {HIDDEN} and a vocabulary of {VOCAB:,}, bf16, one rank; output layer and cross "
        "entropy of each token, forward and backward, a tenth of the tokens masked. GiB: the peak beyond "
        "input, weight and their gradients. Ceiling: the three products that any way needs, at the matmul "
        "rate. Ours knows the mask in the forward pass, as in training; where it does not, it makes the "
        f"logits twice, a fourth product. Bounds: at most {TIMES:g} times the time of the faster host, at "
        f"most {EXTRA_GIB:g} GiB.",
        "",
        ceilings.text(),
    )
    with runs.one_rank() as groups:
        missed = measure(report, sizes, ceilings.tflops, groups)
    return report.verdict(missed, "both bounds are kept, gradients are the host's")


if __name__ == "__main__":
    sys.exit(main())
