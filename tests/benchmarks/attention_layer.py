"""How fast is a whole gated attention layer, beside the host's, and what is neither products nor core?

python -m tests.benchmarks.attention_layer    on a GPU, from the root; writes results/attention_layer.md

Projection of queries, keys, values and gates, norms, RoPE, attention, output gate, output projection: forward
and backward to the input and every parameter, on 8 documents of 4,096 tokens. Rival: megatron-core's own
SelfAttention with the parts of its local backend, which cannot pack and gets the documents as rows.

Predicted for one H200, before anything was measured: products 7 ms, core 10 ms, bytes 0.9 ms, in all 18 ms;
ours 22 ms, since RoPE and the output gate are plain PyTorch; host 90 ms.

Exit status 1 if a bound is missed or the layers give different results.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate

from tests.benchmarks import runs  # isort: split

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megatron_gdn.layer_specs import get_qwen35_chunkwise_cp_spec
from megatron_gdn.ops.attention import attention
from megatron_gdn.stream import StreamParams, StreamPlan
from tests.benchmarks import host_model
from tests.benchmarks.gdn_layer import both_ways

DOCUMENTS, DOCUMENT = 8, 4096
TIMES_FASTER = 2.0
TIMES_FLOOR = 1.5
SAME = 3e-2
"""Relative error of two bf16 outputs."""


def build_ours(tiny: bool, groups) -> torch.nn.Module:
    """The attention layer of the spec that users name."""
    config = runs.model_config(tiny)
    layers = get_qwen35_chunkwise_cp_spec(config).layer_specs
    number = config.linear_attention_freq
    spec = layers[number - 1].submodules.self_attention
    layer = build_module(spec, config=config, layer_number=number, pg_collection=groups, cp_comm_type="p2p")
    return layer.to(runs.DEVICE).bfloat16()


def build_host(tiny: bool, groups, ours: torch.nn.Module) -> torch.nn.Module:
    """The host's layer with our layer's weights; norm weights are their starting values in both."""
    config = host_model.config(tiny, masked_softmax_fusion=False)
    layer = build_module(
        host_model.attention_spec(), config=config, layer_number=ours.layer_number, pg_collection=groups
    )
    layer = layer.to(runs.DEVICE).bfloat16()
    host_model.copy_weights(layer, ours, but="layernorm")
    return layer


def host_forward(host: torch.nn.Module, hidden: Tensor, length: int) -> Tensor:
    """The host's output on documents of one length as rows, laid end to end, [s, 1, hidden]."""
    config = host.config
    rope = RotaryEmbedding(config.kv_channels, config.rotary_percent, rotary_base=config.rotary_base)
    rows = hidden.view(-1, length, hidden.shape[-1]).transpose(0, 1)
    out = host(rows, None, rotary_pos_emb=rope.to(runs.DEVICE)(length))[0]
    return out.transpose(0, 1).reshape(hidden.shape)


def core_alone(layer: torch.nn.Module, plan: StreamPlan) -> Callable[[], None]:
    """Attention on random queries, keys and values of the layer's shapes."""
    config = layer.config
    leaves = [
        torch.randn(
            1, plan.seq_len, heads, config.kv_channels, device=runs.DEVICE, dtype=torch.bfloat16
        ).requires_grad_()
        for heads in (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
    ]
    return both_ways(lambda: attention(*leaves, config.kv_channels**-0.5, plan.stream_rows), *leaves)


def floor_parts(layer: torch.nn.Module, tokens: int, ceilings: runs.Ceilings) -> tuple[float, float]:
    """Milliseconds of the two projections, and of what norms with RoPE and the gate must read and write.

    Queries and keys: in and out forward; input, upstream and result backward. Gate: two in and one out
    forward; upstream, both inputs and two results backward.
    """
    weights = layer.linear_qkv.weight.numel() + layer.linear_proj.weight.numel()
    config = layer.config
    channels = config.kv_channels * (
        5 * (config.num_attention_heads + config.num_query_groups) + 8 * config.num_attention_heads
    )
    return ceilings.floor_parts(tokens, weights, channels)


def measure(report: runs.LiveReport, tiny: bool, ceilings: runs.Ceilings, groups) -> list[str]:
    """Both layers and the parts that the floor is made of; returns the bounds missed."""
    length = 16 if tiny else DOCUMENT
    tokens = DOCUMENTS * length
    layer = build_ours(tiny, groups)
    host = build_host(tiny, groups, layer)
    hidden = torch.randn(tokens, 1, layer.config.hidden_size, device=runs.DEVICE, dtype=torch.bfloat16)
    hidden.requires_grad_()
    borders = tuple(accumulate([length] * DOCUMENTS, initial=0))
    plan = StreamPlan(layer.config.cp_layout, 1, 0, tokens, 1, borders, runs.DEVICE)
    params = StreamParams(qkv_format="sbhd", plan=plan)
    products, traffic = floor_parts(layer, tokens, ceilings)
    core = runs.milliseconds(core_alone(layer, plan))
    floor = products + core + traffic
    report.table(
        f"{tokens:,} tokens in {DOCUMENTS} documents, one rank",
        ["layer", "ms", "host's time / this", "of the floor", "peak, GiB", "kept, GiB", "launches", "copies"],
    )
    forwards = {
        "host": (host, lambda: host_forward(host, hidden, length)),
        "ours": (layer, lambda: layer(hidden, None, packed_seq_params=params)[0]),
    }
    times, outputs = {}, {}
    for name, (module, forward) in forwards.items():
        outputs[name] = forward().detach()
        run = both_ways(forward, hidden, *module.parameters())
        times[name], counts = runs.milliseconds(run), runs.count(run)
        report.row(
            name,
            f"{times[name]:.2f}",
            f"{times['host'] / times[name]:.2f}",
            f"{times[name] / floor:.2f}",
            f"{runs.peak_gib(run):.2f}",
            f"{runs.saved_gib(forward):.2f}",
            counts.launches,
            counts.copies,
        )
    report.row("floor", f"{floor:.2f}", "", "1", "", "", "", "")
    for name, part in {"products": products, "core": core, "bytes": traffic}.items():
        report.row(f"- {name}", f"{part:.2f}", "", "", "", "", "", "")
    if (error := runs.relative_error(outputs["host"], outputs["ours"])) > SAME:
        raise RuntimeError(f"the outputs differ by {error:.1e}")
    return runs.missed_times(times["host"], times["ours"], floor, TIMES_FASTER, TIMES_FLOOR)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the table."""
    arguments = runs.read_arguments(__doc__, argv)
    ceilings = runs.Ceilings.measure()
    report = runs.LiveReport(
        arguments.results,
        "attention_layer",
        "# The gated attention layer",
        "",
        *__doc__.split("\n\n")[2:4],
        "",
        f"Floor: the two projections at the measured matmul rate, the core alone as measured here, and what "
        f"norms with RoPE and the output gate must read and write at the measured bandwidth. Bounds: at "
        f"least {TIMES_FASTER:g} times the host's speed, at most {TIMES_FLOOR:g} times the floor. Peak: "
        "beyond weights and input, gradients included. Kept: from forward to backward.",
        "",
        ceilings.text(),
    )
    with runs.one_rank() as groups:
        missed = measure(report, arguments.tiny, ceilings, groups)
    return report.verdict(missed)


if __name__ == "__main__":
    sys.exit(main())
