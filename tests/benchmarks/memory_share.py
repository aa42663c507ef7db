"""How much memory does one rank's share of a long stream take, by the number of context-parallel ranks?

python -m tests.benchmarks.memory_share    on a GPU, from the root of the repository; writes
results/memory_share.md

A whole GatedDeltaNet and a whole attention layer of Qwen3.5 35B-A3B, forward and backward, on one rank of 1,
2, 4 and 8 that share a stream of 131,072 tokens. One process plays one rank: its group has the wanted size,
but the others do not exist, so that what would come from them has its shape and is never written (torch's
"fake" process group). Memory does not depend on values.

Predicted for one H200, before anything was measured: GatedDeltaNet 12 GiB and attention 9 GiB at CP 1; peaks
fall as 1/CP but for a constant of 0.2 GiB, the gradients of the weights; attention by all_gather keeps the
whole stream's keys and values, 0.25 GiB, besides.

Exit status 1 if a share is larger than 1.15 times what 1/CP and a constant give.
"""

import sys
from collections.abc import Sequence

from tests.benchmarks import runs  # isort: split

import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn import layer_specs

TOKENS = 131_072
CP_SIZES = (1, 2, 4, 8)
SLACK = 1.15
LAYERS = {
    "GatedDeltaNet, chunkwise": ("chunkwise", 0, "p2p"),
    "attention, p2p": ("chunkwise", -1, "p2p"),
    "attention, all_gather": ("chunkwise", -1, "all_gather"),
    "GatedDeltaNet, headwise": ("headwise", 0, "p2p"),
}
"""Name: GDN mode, place among the layers, communication of attention. Last what may have to compile."""


def share(name: str, tiny: bool, cp: int) -> tuple[float, float]:
    """GiB of one rank: at the peak of forward and backward beyond weights and input, and kept in between."""
    mode, place, cp_comm_type = LAYERS[name]
    heads = {"linear_num_key_heads": 8, "linear_num_value_heads": 8} if tiny else {}  # shared out over 8
    cfg = runs.model_config(tiny, num_layers=4, context_parallel_size=cp, cp_comm_type=cp_comm_type, **heads)
    with runs.one_rank(cp=cp, rank=cp - 1) as groups:
        spec = getattr(layer_specs, f"get_qwen35_{mode}_cp_spec")(cfg).layer_specs[place].submodules
        layer = build_module(
            spec.self_attention,
            config=cfg,
            layer_number=4 if place else 1,
            pg_collection=groups,
            cp_comm_type=cp_comm_type,
        ).to(runs.DEVICE)
        tokens = (1024 if tiny else TOKENS) // cp
        hidden = torch.randn(tokens, 1, cfg.hidden_size, device=runs.DEVICE, dtype=torch.bfloat16)
        hidden.requires_grad_()
        upstream = torch.randn_like(hidden)
        leaves = (hidden, *layer.parameters())

        def forward() -> torch.Tensor:
            return layer(hidden, attention_mask=None)[0]

        def both() -> None:
            torch.autograd.grad(forward(), leaves, upstream)

        saved = runs.saved_gib(forward)
        if not runs.RUNS_ON_CPU:
            both()  # what kernels set up once is not counted
        peak = runs.peak_gib(both)
    runs.empty_cache()
    return peak, saved


def line(shares: Sequence[float]) -> tuple[float, float]:
    """(a, b) of a / CP + b through the shares of the smallest and the largest CP size."""
    first, last = 1 / CP_SIZES[0], 1 / CP_SIZES[-1]
    slope = (shares[0] - shares[-1]) / (first - last)
    return slope, shares[-1] - slope * last


def worst_ratio(shares: Sequence[float]) -> float:
    """The largest share over what the line gives there."""
    slope, constant = line(shares)
    return max(got / (slope / cp + constant) for got, cp in zip(shares, CP_SIZES, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the tables."""
    arguments = runs.read_arguments(__doc__, argv)
    report = runs.LiveReport(
        arguments.results,
        "memory_share",
        "# Memory of one rank's share of a stream",
        "",
        *"\n\n".join(__doc__.split("\n\n")[2:4]).splitlines(),
        "",
        "Peak: beyond weights and input, gradients included. Kept: what forward keeps for backward, weights "
        "left out. a / CP + b goes through the figures of the smallest and the largest CP size.",
        "",
        runs.Ceilings(0, 0).text() if runs.RUNS_ON_CPU else runs.report.gpu(),
    )
    head = ["layer, GiB", *(f"CP {cp}" for cp in CP_SIZES), "a", "b", "worst of the line"]
    report.table("Peak, and kept for backward", head)
    missed = []
    for name in LAYERS:
        shares = [share(name, arguments.tiny, cp) for cp in CP_SIZES]
        for what, figures in zip(("peak", "kept"), zip(*shares, strict=True), strict=True):
            slope, constant = line(figures)
            ratio = worst_ratio(figures)
            report.row(
                f"{name}, {what}",
                *(f"{x:.4f}" if arguments.tiny else f"{x:.2f}" for x in figures),
                f"{slope:.2f}",
                f"{constant:.2f}",
                f"{ratio:.2f}",
            )
            if ratio > SLACK or constant > figures[0] / CP_SIZES[-1]:
                missed.append(f"{name}, {what}: does not fall as 1/CP and a small constant")
    return report.verdict(missed, "every share falls as 1/CP and a constant")


if __name__ == "__main__":
    sys.exit(main())
