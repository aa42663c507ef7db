"""How fast does an 8-layer full-width slice of Qwen3.5 35B-A3B train on one GPU, beside the host's own model?

python -m tests.benchmarks.slice    on a GPU, from the root of the repository; writes results/slice.md

Six GatedDeltaNet and two attention layers with all their experts, embedding, loss and optimizer, on 32,768
tokens in 8 documents of 4,096: ours as one packed stream; the host, which without TransformerEngine cannot
pack, as 8 rows, the same work. The host's model is megatron-core's GPT with its GatedDeltaNet, attention, MoE
layer and norms of the local backend, on as many documents as fit: 1, 2, 4 or 8.

What fits: a parameter takes 2 bytes, its gradient 4, and the optimizer 12 more. With 256 experts the slice
has 7.8e9 parameters: 43 GiB without optimizer, 130 with it, which leaves nothing for activations. So there
are two tables: 256 experts without an optimizer, and 128 experts (4.5e9 parameters, 76 GiB) with it. A token
uses as many parameters in both.

Predicted for one H200, before anything was measured: model FLOPs 2.2e14 per step; ours 700 ms and 310
TFLOP/s without optimizer, 60 ms more with it; the host at most 90 TFLOP/s, at 16,384 tokens for lack of
memory.

Exit status 1 if a bound is missed.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from tests.benchmarks import runs  # isort: split

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from megatron_gdn.config import SIZES, Qwen35Config, count_parameters
from megatron_gdn.layer_specs import get_qwen35_chunkwise_cp_spec
from megatron_gdn.microbatch import cut_microbatch
from megatron_gdn.model import build_model
from megatron_gdn.optimizer import fuse_optimizer_step
from tests.benchmarks import host_model
from tests.helpers.distributed import run_ranks

LAYERS, DOCUMENTS, DOCUMENT = 8, 8, 4096
EXPERTS = {"without optimizer": 256, "with optimizer": 128}
TIMES_FASTER = 3.0
TFLOPS = 300.0
SECONDS = 240
"""For one model, its kernels' compilation included."""


@dataclass(frozen=True)
class Case:
    """One model on one number of documents."""

    tiny: bool
    host: bool
    experts: int
    optimizer: bool
    layers: int = LAYERS
    documents: int = DOCUMENTS

    @property
    def lengths(self) -> list[int]:
        """Of the documents."""
        return [16 if self.tiny else DOCUMENT] * self.documents

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return SIZES["debug" if self.tiny else runs.SIZE].vocab_size

    def config(self) -> Qwen35Config:
        """As `pretrain_qwen35.py` configures the model."""
        make = host_model.config if self.host else runs.model_config
        # The host's fused softmax is part of apex.
        unfused = {"masked_softmax_fusion": False} if self.host else {}
        return make(
            self.tiny,
            num_layers=4 if self.tiny and self.host else self.layers,
            num_moe_experts=min(self.experts, 8) if self.tiny else self.experts,
            bias_activation_fusion=True,
            **unfused,
        )


def build(case: Case, groups) -> DistributedDataParallel:
    """The model in the host's gradient buffers, as the host's `get_model` wraps it."""
    config, length = case.config(), sum(case.lengths)
    if case.host:
        host_model.run_here()
        model = GPTModel(
            config,
            host_model.block(config),
            case.vocab_size,
            length,
            position_embedding_type="rope",
            rotary_percent=config.rotary_percent,
            rotary_base=int(config.rotary_base),
            pg_collection=groups,
        )
    else:
        whole = SimpleNamespace(
            transformer=config,
            transformer_layer_spec=get_qwen35_chunkwise_cp_spec,
            vocab_size=case.vocab_size,
            seq_length=length,
            fp16_lm_cross_entropy=False,
            parallel_output=True,
            share_embeddings_and_output_weights=False,
        )
        model = build_model(whole, groups)
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=case.optimizer
    )
    return DistributedDataParallel(
        config, buffers, Float16Module(config, model.to(runs.DEVICE)), pg_collection=groups
    )


def forward_backward(case: Case, model: DistributedDataParallel, groups) -> Callable[[], float]:
    """One microbatch from the CPU to gradients in their buffers; gives the mean loss, still on the device."""
    sample = runs.make_sample(case.lengths, case.vocab_size)

    def run() -> Any:
        model.zero_grad_buffer()
        if case.host:
            shape = (case.documents, -1)
            tokens, labels, mask, positions = (
                sample[name].reshape(shape).to(runs.DEVICE, non_blocking=True)
                for name in ("tokens", "labels", "loss_mask", "position_ids")
            )
            losses = model(tokens, positions, None, labels=labels)
        else:
            part = cut_microbatch(
                sample,
                packed=True,
                layout=model.module.config.cp_layout,
                cp_size=1,
                cp_rank=0,
                device=runs.DEVICE,
            )
            mask = part.loss_mask
            losses = model(
                part.tokens,
                part.position_ids,
                None,
                labels=part.labels,
                loss_mask=mask,
                packed_seq_params=part.params,
            )
        loss = (losses.float() * mask).sum() / sum(case.lengths)
        loss.backward()
        finalize_model_grads([model], pg_collection=groups)
        return loss.detach()

    return run


def make_optimizer(case: Case, model: DistributedDataParallel, groups):
    """The distributed optimizer of bf16 parameters with fp32 masters, on one rank."""
    if not case.host:
        fuse_optimizer_step()
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-5,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False, pg_collection=groups)


def model_flops(case: Case) -> float:
    """6 per token and parameter that it uses, the embedding's lookup left out; 6 L^2 H D per causal document,
    attention layer and step. The recurrence's own arithmetic and recomputed work are not counted."""
    config = case.config()
    active = count_parameters(config, case.vocab_size, tied=True)[1]
    attention_layers = config.num_layers // config.linear_attention_freq
    heads = config.num_attention_heads * config.kv_channels
    squares = sum(length**2 for length in case.lengths)
    return 6 * sum(case.lengths) * active + 6 * attention_layers * squares * heads


@dataclass(frozen=True)
class Result:
    """Of the largest case that fits."""

    case: Case
    milliseconds: float
    optimizer_milliseconds: float
    peak: float
    loss: float

    @property
    def tflops(self) -> float:
        """Model FLOPs per second of the whole step, 1e12."""
        return model_flops(self.case) / (self.milliseconds + self.optimizer_milliseconds) / 1e9


def measure(case: Case, groups) -> Result | None:
    """Build a model and time it on as many documents as fit in memory; None if not even one does.

    The host's goes from few documents to many: a forward pass that ran out of memory leaves its tensors in
    the host's dispatchers, which leaves less for the next.
    """
    torch.manual_seed(1)
    result = None
    try:
        model = build(case, groups)
        optimizer = make_optimizer(case, model, groups) if case.optimizer else None
        for documents in (1, 2, 4, case.documents) if case.host else (case.documents,):
            result = time_steps(replace(case, documents=documents), model, optimizer, groups)
            runs.empty_cache()
    except torch.cuda.OutOfMemoryError:
        print(f"out of memory after {result}: {case}", flush=True)
    return result


def time_steps(case: Case, model: DistributedDataParallel, optimizer, groups) -> Result:
    """Time steps on one number of documents; out of memory is the caller's concern."""
    run = forward_backward(case, model, groups)
    loss, optimizer_ms = float(run()), 0.0
    if optimizer:
        optimizer_ms = runs.milliseconds(optimizer.step, repeats=3, warm_up=1)
    step_ms = runs.milliseconds(run, repeats=5, warm_up=1)
    peak = float("nan")
    if not runs.RUNS_ON_CPU:
        torch.cuda.reset_peak_memory_stats()
        run()
        if optimizer:
            optimizer.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**30
    return Result(case, step_ms, optimizer_ms, peak, loss)


def count(case: Case, groups) -> dict[int, runs.Counts]:
    """What one forward and backward launches, copies and waits for, by number of layers."""
    counts = {}
    for layers in (LAYERS, 4):  # the host's record of auxiliary losses is as long as the first model
        sized = replace(case, layers=layers)
        seen = runs.count(forward_backward(sized, build(sized, groups), groups))
        if runs.RUNS_ON_CPU:
            # There torch's grouped product reads where each expert ends, 2 forward and 4 backward a layer.
            seen = seen._replace(syncs=seen.syncs - 6 * case.config().num_moe_experts * layers)
        counts[layers] = seen
    return counts


def in_a_process(function: Callable[[Case, Any], Any], case: Case) -> Any:
    """What `function` gives for a case and groups.

    In a process of its own: the host's gradient hooks hold the model in a circle that Python's garbage
    collector cannot see, so that its memory comes back with the process only.
    """
    start = "fork" if runs.RUNS_ON_CPU else "spawn"
    return run_ranks(_only_rank, 1, function, case, start=start, timeout=SECONDS)[0]


def _only_rank(rank: int, world_size: int, function: Callable[[Case, Any], Any], case: Case) -> Any:
    torch.distributed.destroy_process_group()
    with runs.one_rank() as groups:
        return function(case, groups)


def tables(report: runs.LiveReport, tiny: bool, ceilings: runs.Ceilings) -> list[str]:
    """Both models without and with an optimizer; returns the bounds missed."""
    missed = []
    head = "model, tokens, fwd+bwd ms, optimizer ms, model TFLOP/s, of the matmul rate, peak GiB, first loss"
    for title, experts in EXPERTS.items():
        report.table(f"{experts} experts, {title}", head.split(", "))
        rates = {}
        for name in ("ours", "host"):
            case = Case(tiny, name == "host", experts, optimizer=title == "with optimizer")
            result = in_a_process(measure, case)
            if result is None:
                report.row(name, "does not fit", *[""] * 6)
                continue
            rates[name] = result.tflops
            report.row(
                name,
                f"{sum(result.case.lengths):,}",
                f"{result.milliseconds:.0f}",
                f"{result.optimizer_milliseconds:.0f}" if case.optimizer else "-",
                f"{result.tflops:.0f}",
                f"{result.tflops / ceilings.tflops:.0%}",
                f"{result.peak:.1f}",
                f"{result.loss:.3f}",
            )
        if rates.get("ours", 0) < TFLOPS:
            missed.append(f"{title}: {rates.get('ours', 0):.0f} TFLOP/s, wanted {TFLOPS:g}")
        if "host" in rates and rates["ours"] < TIMES_FASTER * rates["host"]:
            missed.append(f"{title}: {rates['ours'] / rates['host']:.1f} times the host's rate")
    return missed


def sync_table(report: runs.LiveReport, tiny: bool) -> list[str]:
    """Host syncs of our forward and backward, cutting of the microbatch included, by number of layers."""
    report.table("Ours by number of layers", ["layers", "launches", "copies", "syncs with the host"])
    counts = in_a_process(count, Case(tiny, False, min(EXPERTS.values()), optimizer=False))
    for layers, seen in sorted(counts.items()):
        report.row(layers, *seen)
    few, many = counts[4].syncs, counts[LAYERS].syncs
    return [f"{few} syncs with 4 layers, {many} with {LAYERS}"] if many > few else []


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the tables."""
    arguments = runs.read_arguments(__doc__, argv)
    ceilings = runs.Ceilings.measure()
    report = runs.LiveReport(
        arguments.results,
        "slice",
        "# An 8-layer slice of Qwen3.5 35B-A3B",
        "",
        *"\n\n".join(__doc__.split("\n\n")[2:5]).splitlines(),
        "",
        f"Model FLOPs: {' '.join(model_flops.__doc__.split())} Peak: all that is allocated. Bounds: at least "
        f"{TIMES_FASTER:g} times the host's rate, {TFLOPS:g} TFLOP/s, and no more syncs with more layers. "
        "Beside it: 135.6 TFLOP/s per GPU are published for the whole model on 16 H100.",
        "",
        ceilings.text(),
    )
    runs.empty_cache()
    missed = tables(report, arguments.tiny, ceilings)
    missed += sync_table(report, arguments.tiny)
    return report.verdict(missed)


if __name__ == "__main__":
    sys.exit(main())
