"""How fast is a loss without whole logits, and how much memory does it take, beside losses with them?

python -m tests.benchmarks.linear_cross_entropy    on a GPU; writes results/linear_cross_entropy.md

Exit status 1 if a bound is missed.
"""

import sys
from collections.abc import Callable

import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from torch import Tensor

from megatron_gdn.config import Qwen35Config
from megatron_gdn.output_layer import OutputLayer
from tests.benchmarks.gpu import machine, matmul_tflops, milliseconds, one_rank, peak_gib
from tests.benchmarks.report import RESULTS, provenance, table

TOKENS, HIDDEN, VOCAB = 32_768, 2048, 248_320
TIMES = 1.1
EXTRA_GIB = 4.0


def layers(groups, loss_mask: Tensor) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Hidden states and labels to losses [B, s], by name; all with one weight."""
    config = Qwen35Config.from_size(
        "35b-a3b", params_dtype=torch.bfloat16, bf16=True, transformer_impl="local"
    )
    made = [
        kind(HIDDEN, VOCAB, config=config, init_method=config.init_method, bias=False, tp_group=groups.tp)
        for kind in (OutputLayer, ColumnParallelLinear)
    ]
    ours, host = (layer.cuda() for layer in made)
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


def main() -> int:
    """Measure, print and write the table."""
    with one_rank() as groups:
        return measure(groups)


def measure(groups) -> int:
    """The table, on one rank's groups."""
    hidden = torch.randn(TOKENS, 1, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(VOCAB, (1, TOKENS), device="cuda")
    loss_mask = (torch.rand(1, TOKENS, device="cuda") > 0.1).float()
    upstream = loss_mask / loss_mask.sum()
    functions, weight = layers(groups, loss_mask)
    ceiling = matmul_tflops()
    floor = 6 * TOKENS * HIDDEN * VOCAB / ceiling / 1e9
    times, forwards, peaks, results = {}, {}, {}, {}
    for name, function in functions.items():

        def run(function: Callable = function) -> None:
            hidden.grad = weight.grad = None
            function(hidden, labels).backward(upstream)

        times[name] = milliseconds(run, repeats=5, warm_up=2)
        with torch.no_grad():
            forwards[name] = milliseconds(lambda f=function: f(hidden, labels), repeats=3, warm_up=1)
        results[name] = [hidden.grad.float().cpu(), weight.grad[::97].float().cpu()]
        hidden.grad = weight.grad = None
        # The gradients themselves are needed whatever the method.
        gradients = (hidden.nbytes + weight.nbytes) / 2**30
        peaks[name] = peak_gib(run) - gradients
        torch.cuda.empty_cache()
        print(f"{name}: {times[name]:.1f} ms, {peaks[name]:.2f} GiB", flush=True)
    for name, (d_hidden, d_weight) in results.items():
        for got, want in ((d_hidden, results["host"][0]), (d_weight, results["host"][1])):
            error = (got - want).norm() / want.norm()
            print(f"{name}: gradient differs from the host's by {error:.1e}", flush=True)
            if not error < 2e-2:
                raise RuntimeError(f"the gradients of {name} differ from the host's")
    best = min(ms for name, ms in times.items() if name.startswith("host"))
    missed = times["ours"] > TIMES * best or peaks["ours"] > EXTRA_GIB
    rows = [
        [
            name,
            f"{forwards[name]:.1f}",
            f"{ms:.1f}",
            f"{ms / times['ours']:.2f}",
            f"{ms / floor:.2f}",
            f"{peaks[name]:.2f}",
        ]
        for name, ms in times.items()
    ]
    text = "\n".join(
        [
            "# The loss without whole logits",
            "",
            f"{TOKENS:,} tokens of {HIDDEN} and a vocabulary of {VOCAB:,}, bf16, one rank; output layer and "
            "cross entropy of each token, forward and backward, a tenth of the tokens masked. Extra memory: "
            "the peak beyond input, weight and their gradients. Ceiling: the three products that any way "
            f"needs take {floor:.0f} ms at the matmul rate measured in this run. Ours knows the mask in the "
            "forward pass, as in training; where it does not, it makes the logits twice, a fourth product. "
            f"Bounds: at most {TIMES:g} times the time of the faster host ({times['ours'] / best:.2f} "
            f"here), at most {EXTRA_GIB:g} GiB.",
            "",
            *provenance("python -m tests.benchmarks.linear_cross_entropy"),
            *machine(),
            "",
            table(
                ["loss", "forward, ms", "both, ms", "over ours", "over the ceiling", "extra memory, GiB"],
                rows,
            ),
        ]
    )
    print(text)
    (RESULTS / "linear_cross_entropy.md").write_text(text)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
