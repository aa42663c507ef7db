"""How much less do activations take when they are recomputed, under context parallelism?

python -m tests.benchmarks.recompute_memory      from the root of the repository

Writes results/recompute_memory.md, or results/recompute_memory_gpu.md where there is a GPU. Exit status 1
if a way of recomputing keeps no less than training without it, or gives another loss.
"""

import sys

import torch

from megatron_gdn import cpu
from tests.benchmarks.report import RESULTS, provenance, table
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.saved_bytes import watch_saved_bytes

CP, TOKENS, MIB = 2, 256, 2**20
"""Tokens of the whole stream."""
SHAPE = {
    "num_layers": 4,
    "linear_attention_freq": 4,
    "hidden_size": 1024,
    "ffn_hidden_size": 3584,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""One period of the 0.8B model: three GatedDeltaNet layers and one of attention."""
NONE = "nothing"
WAYS: dict[str, tuple[str, ...] | None] = {
    NONE: (),
    "`selective`: `gdn_norm_out`": ("gdn_norm_out",),
    "`selective`: `core_attn`": ("core_attn",),
    "`selective`: `mlp`": ("mlp",),
    "`selective`: `gdn_norm_out core_attn mlp`": ("gdn_norm_out", "core_attn", "mlp"),
    "`full`, `uniform`, 1 layer": None,
}
"""Modules of --recompute-modules by name; None: whole layers."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def fields_of(modules: tuple[str, ...] | None) -> dict:
    """Of the config, for one way of recomputing."""
    if modules is None:
        return FULL
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}


def measure(rank: int, world_size: int, mode: str) -> dict[str, tuple[float, int, int]]:
    """Loss, bytes kept after the forward pass and most bytes held, by way, on this rank."""
    cpu.enable()
    from tests.helpers.model import DENSE_MODEL, VOCAB, make_model

    found = {}
    with make_groups(cp=world_size) as groups:
        tokens = torch.randint(VOCAB, (1, TOKENS // world_size), device=torch.cuda.current_device())
        for name, modules in WAYS.items():
            torch.manual_seed(1)
            model = make_model(groups, mode, **DENSE_MODEL | SHAPE | fields_of(modules))
            if torch.cuda.is_available():
                found[name] = _on_gpu(model, tokens)
                continue
            with watch_saved_bytes(model.parameters()) as watch:
                loss = model(tokens, None, None, labels=tokens).mean()
                kept = watch.now()
                loss.backward()
            found[name] = loss.item(), kept, watch.peak
    return found


def _on_gpu(model, tokens) -> tuple[float, int, int]:
    model = model.cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = model(tokens, None, None, labels=tokens).mean()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return loss.item(), kept, torch.cuda.max_memory_allocated() - before


def memory_table(results: dict[str, dict[str, tuple[float, int, int]]]) -> str:
    """The Markdown table, of the first rank."""
    head = ["recomputed"]
    for mode in results:
        head += [f"{mode}: kept, MiB", "share", "most, MiB", "share"]
    rows = []
    for name in WAYS:
        row: list[object] = [name]
        for found in results.values():
            for part in (1, 2):
                size, whole = found[name][part], found[NONE][part]
                row += [f"{size / MIB:,.1f}", f"{size / whole:.0%}"]
        rows.append(row)
    return table(head, rows)


def missed(results: dict[str, dict[str, tuple[float, int, int]]]) -> list[str]:
    """Ways that keep no less, or whose loss is another."""
    return [
        f"{mode}, {name}"
        for mode, found in results.items()
        for name in WAYS
        if name != NONE and (found[name][1] >= found[NONE][1] or found[name][0] != found[NONE][0])
    ]


def main() -> int:
    """Measure, print and write the table."""
    gpu = torch.cuda.is_available()
    results = {
        mode: run_ranks(measure, CP, mode, timeout=500, start="spawn" if gpu else "fork")[0]
        for mode in ("headwise", "chunkwise")
    }
    how = (
        "Allocated by CUDA beyond parameters and gradient buffers"
        if gpu
        else "Memory behind the tensors that autograd saves, each storage once, without parameters"
    )
    text = "\n".join(
        [
            "# Memory of activations with recomputation",
            "",
            f"Of one rank of CP {CP}, one period of the 0.8B model (three GatedDeltaNet layers, one of "
            f"attention), a stream of {TOKENS:,} tokens in fp32, vocabulary of 96. {how}. Kept: after the "
            "forward pass. Most: at any time, so with what is recomputed for one layer. The loss is the same "
            "to the last bit in every row.",
            "",
            *provenance("python -m tests.benchmarks.recompute_memory"),
            "",
            memory_table(results),
        ]
    )
    print(text)
    (RESULTS / f"recompute_memory{'_gpu' if gpu else ''}.md").write_text(text)
    for way in missed(results):
        print(f"keeps no less, or has another loss: {way}")
    return int(bool(missed(results)))


if __name__ == "__main__":
    cpu.enable()
    sys.exit(main())
