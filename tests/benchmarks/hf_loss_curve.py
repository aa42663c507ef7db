"""Do 2,000 steps from one Hugging Face checkpoint give the same loss with and without context parallelism?

    python -m tests.benchmarks.hf_loss_curve      from the root; writes results/hf_loss_curve.md and .png

A small model of Qwen3.5's dense shape, 8 layers, is made by transformers, converted, and trained on real text
by `pretrain_qwen35.py` on one rank and on two, in fp32 and bf16. All runs load the same weights, or the
command stops; but for the noise floor, one rank that starts from weights moved to a neighbouring number.
Losses are smoothed by a running mean. A command that was stopped goes on from the runs it has kept.
Exit status 1 if a bound is missed, by the noise floor too: its deviation is chaos, and would hide a fault's.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import numpy

from megatron_gdn import cpu
from tests.benchmarks import training_runs
from tests.benchmarks.report import RESULTS, commit, provenance, table
from tests.benchmarks.training_runs import (
    PACKED,
    check_digest,
    lengthen_memory,
    make_data,
    save_nudged,
    spec,
    start_of,
    start_switches,
)

ITERATIONS = 2000
WINDOW = 50
"""Steps of the running mean."""
BOUNDS = {"fp32": 1e-5, "bf16": 5e-3}
"""Largest relative deviation of the smoothed loss from that of one rank."""
RUNS = {
    "CP 1": ("headwise", 1, 0),
    "CP 1, last bit of the weights changed, 1": ("headwise", 1, 1),
    "CP 1, last bit of the weights changed, 2": ("headwise", 1, 2),
    "CP 2, headwise": ("headwise", 2, 0),
    "CP 2, chunkwise": ("chunkwise", 2, 0),
}
"""Name -> GDN mode, ranks and coin (of the noise floor); the first is what the others are compared with."""
MODEL = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
FLAGS = {
    "qwen35-size": None,
    "cp-comm-type": "p2p",
    "seq-length": 128,
    "micro-batch-size": 1,
    "global-batch-size": 1,
    "lr": 1.5e-4,
    "min-lr": 1.5e-5,
    "lr-decay-style": "cosine",
    "lr-warmup-iters": 200,
}
"""Over those of `training_runs`. README.md says why this learning rate."""
TIMEOUT = 3600
"""Seconds for one run."""


def make_model(folder: Path) -> None:
    """Save a random model as transformers does, and convert it; into `folder`/hf and `folder`/megatron."""
    import torch

    from megatron_gdn.checkpoint.huggingface import to_megatron
    from tests.helpers.hf import transformers_models

    transformers = transformers_models()
    torch.manual_seed(1)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**MODEL))
    with torch.no_grad():
        lengthen_memory([model])
    model.save_pretrained(folder / "hf")
    print(to_megatron.convert(folder / "hf", folder / "megatron", workers=1))


def train(name: str, dtype: str, iterations: int, prefix: str, work: Path) -> dict:
    """One run: its losses, the digest of the weights it began with, its seconds and the commit."""
    mode, cp, coin = RUNS[name]
    folder = work / f"{dtype}_{name}_{iterations}".replace(", ", "_").replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    flags = FLAGS | {
        "from-hf": work / "hf",  # sizes; the weights are those converted
        "load": start_of(work / "megatron", dtype, coin),
        "data-path": prefix,
        "spec": spec(mode),
        "train-iters": iterations,
        "lr-decay-iters": iterations,
        "lr-warmup-iters": min(FLAGS["lr-warmup-iters"], iterations // 10),
    }
    switches = start_switches(dtype) + PACKED
    records, digest, seconds = training_runs.train(flags, switches, cp, folder, TIMEOUT)
    losses = [record["lm loss"] for record in records]
    return {"losses": losses, "digest": digest, "seconds": seconds, "commit": commit()}


def check_digests(dtype: str, by_name: dict[str, dict]) -> None:
    """Every run started from the reference's weights, and the noise floor did not."""
    reference = next(iter(by_name.values()))["digest"]
    for name, run in by_name.items():
        check_digest(f"{dtype}, {name}", run["digest"], reference, RUNS[name][2])


def commit_of(runs: dict[str, dict[str, dict]]) -> str:
    """The one commit that made all runs."""
    commits = {run["commit"] for by_name in runs.values() for run in by_name.values()}
    if len(commits) > 1:
        raise RuntimeError(f"runs of several commits, {sorted(commits)}: begin in another --work")
    return commits.pop()


def smooth(losses: list[float]) -> numpy.ndarray:
    """Running mean over WINDOW steps, or all if there are fewer."""
    window = min(WINDOW, len(losses))
    return numpy.convolve(losses, numpy.ones(window) / window, mode="valid")


def deviation(losses: list[float], reference: list[float]) -> float:
    """Largest relative deviation of smoothed losses; NaN if there is one."""
    wanted = smooth(reference)
    return float(numpy.max(numpy.abs(smooth(losses) - wanted) / wanted))


def results_table(runs: dict[str, dict[str, dict]]) -> tuple[str, bool]:
    """The Markdown table, and whether all bounds are kept; NaN keeps none."""
    rows, kept = [], True
    for dtype, by_name in runs.items():
        reference = next(iter(by_name.values()))["losses"]
        for name, run in by_name.items():
            last = f"{smooth(run['losses'])[-1]:.4f}"
            found = [
                deviation(run["losses"][:steps], reference[:steps]) for steps in (100, 500, len(reference))
            ]
            if run["losses"] is reference:
                rows.append([f"{dtype}, {name}", last, "", "", "", "reference"])
                continue
            passed = found[-1] < BOUNDS[dtype]
            kept &= passed
            verdict = f"{'pass' if passed else 'FAIL'} (< {BOUNDS[dtype]:.0e})"
            if RUNS[name][2]:
                verdict = f"noise floor, {'below' if passed else 'NOT below'} {BOUNDS[dtype]:.0e}"
            rows.append([f"{dtype}, {name}", last, *(f"{each:.1e}" for each in found), verdict])
    steps = len(reference)
    head = ["run", "last loss", "deviation, 100 steps", "500 steps", f"{steps:,} steps", ""]
    return table(head, rows), kept


def draw(runs: dict[str, dict[str, dict]], file: Path) -> None:
    """Smoothed losses above; below, how far they have been from one rank's so far, beside the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    looks = ("black", "-"), ("gray", "--"), ("gray", ":"), ("tab:blue", "--"), ("tab:orange", ":")
    figure, axes = pyplot.subplots(2, len(runs), figsize=(10, 6), sharex=True, sharey="row", squeeze=False)
    for (dtype, by_name), (above, below) in zip(runs.items(), axes.T, strict=True):
        reference = next(iter(by_name.values()))["losses"]
        wanted = smooth(reference)
        for (name, run), (color, style) in zip(by_name.items(), looks, strict=True):
            losses = smooth(run["losses"])
            steps = numpy.arange(WINDOW, WINDOW + len(losses))
            above.plot(steps, losses, style, color=color, label=name)
            if run["losses"] is not reference:
                so_far = numpy.maximum.accumulate(numpy.abs(losses - wanted) / wanted)
                below.plot(steps, so_far, style, color=color)
        above.axhline(numpy.nan, color="red", linewidth=0.8, label="bound")  # for the legend
        below.axhline(BOUNDS[dtype], color="red", linewidth=0.8)
        above.set(title=dtype)
        below.set(yscale="log", xlabel="step", ylim=(1e-9, 1e-1))
    axes[0, 0].set(ylabel=f"lm loss, mean of {WINDOW} steps")
    axes[1, 0].set(ylabel="largest deviation from CP 1 so far")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def summary(runs: dict, text: str, source: list[str], iterations: int) -> str:
    """The page: what was run, the table, the picture."""
    sizes = " ".join(f"{name}={value}" for name, value in MODEL.items() if not isinstance(value, dict))
    flags = " ".join(f"--{name} {value}" for name, value in FLAGS.items() if value is not None)
    seconds = sum(run["seconds"] for by_name in runs.values() for run in by_name.values())
    return "\n".join(
        [
            f"# {iterations:,} steps from one Hugging Face checkpoint",
            "",
            f"Largest relative deviation of the loss (running mean of {WINDOW} steps) from the run of one "
            "rank with the same dtype. The noise floor is runs of one rank that start from weights moved to "
            "the next number of that dtype, up or down by the fall of coin 1 or 2. A `Qwen3_5ForCausalLM`, "
            "made by transformers with random weights and states that last for 1 to 1000 tokens, was "
            "converted as `python -m megatron_gdn convert` does and trained on the standard library's own "
            "modules as bytes, documents kept apart.",
            "",
            *source,
            f"- model: `{sizes}`",
            f"- flags: `{flags}`, others as in [parity.md](parity.md)",
            f"- {sum(map(len, runs.values()))} runs in {seconds / 60:.0f} minutes on a shared machine",
            "",
            text,
            "![Loss curves](hf_loss_curve.png)",
            "",
        ]
    )


def main() -> int:
    """Train what is not kept yet; print and write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="another number writes no results")
    parser.add_argument(
        "--work", type=Path, default=Path("hf_loss_curve.work"), help="data and finished runs"
    )
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the table is of gloo on CPUs, and CUDA does not survive a fork
    cpu.enable()
    # Once, before ranks are forked; so all runs have the same code.
    import megatron_gdn.layer_specs  # noqa: F401
    import pretrain_qwen35  # noqa: F401

    work, ready = options.work, options.work / "ready.json"
    if not ready.exists():
        if work.exists():
            parser.error(f"--work {work} exists but was not prepared to the end; remove it or name another")
        work.mkdir()
        make_model(work)
        data = make_data(work)
        flags = FLAGS | {"from-hf": work / "hf", "data-path": data, "spec": spec("headwise")}
        coins = {coin for _, _, coin in RUNS.values() if coin}
        save_nudged(flags, work / "megatron", BOUNDS, coins)
        ready.write_text(json.dumps(data))
    prefix = json.loads(ready.read_text())
    runs: dict[str, dict[str, dict]] = {}
    for dtype in BOUNDS:
        runs[dtype] = {}
        for name in RUNS:
            file = work / f"{dtype}_{name}_{options.iterations}.json"
            if not file.exists():
                begun = file.with_suffix(".begun")
                begun.write_text(json.dumps(train(name, dtype, options.iterations, prefix, work)))
                begun.rename(file)
            runs[dtype][name] = json.loads(file.read_text())
            print(f"{dtype}, {name}: {runs[dtype][name]['seconds']:.0f} s", flush=True)
        check_digests(dtype, runs[dtype])
    text, kept = results_table(runs)
    print(text)
    if options.iterations == ITERATIONS:
        draw(runs, RESULTS / "hf_loss_curve.png")
        source = provenance(
            "python -m tests.benchmarks.hf_loss_curve", "transformers", made_at=commit_of(runs)
        )
        page = summary(runs, text, source, options.iterations)
        (RESULTS / "hf_loss_curve.md").write_text(page)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
