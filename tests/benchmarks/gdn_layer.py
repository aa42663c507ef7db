"""How fast is a whole GatedDeltaNet layer, beside the host's, and what does CP cost where there is none?

python -m tests.benchmarks.gdn_layer    on a GPU, from the root of the repository; writes results/gdn_layer.md

Input projection, convolution, gates, rule, gated norm, output projection: forward and backward to the
input and every parameter. Rival: megatron-core's own GatedDeltaNet, built as its spec builds it, with the
linears and norm of its local backend in place of TransformerEngine's, with fla's own kernels of the rule, as
megatron-core installs it, and with FlashQLA's.

Predicted for one H200, before anything was measured (32,768 tokens): products 9 ms, rule 5 ms, bytes 1.2 ms,
in all 15 ms; ours 24 ms with the gated norm in plain PyTorch (5 ms) and fla's convolution (2.4 ms), 18 ms
with both fused; host 33 ms.

Exit status 1 if a bound is missed or the layers give different results.
"""

import sys
from collections.abc import Callable, Sequence

from tests.benchmarks import runs  # isort: split

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megatron_gdn import layer_specs
from megatron_gdn.config import Qwen35Config
from megatron_gdn.microbatch import cut_microbatch
from megatron_gdn.ops.causal_conv import causal_conv1d_silu
from megatron_gdn.ops.gated_delta_rule import gated_delta_rule
from megatron_gdn.ops.norms import gated_rms_norm
from megatron_gdn.rows import Rows
from megatron_gdn.stream import StreamParams
from tests.benchmarks import host_model
from tests.benchmarks.gpu import fla_with_flash_qla

TOKENS, DOCUMENTS = 32_768, 16
CP = 4
TIMES_FASTER = 2.0
TIMES_FLOOR = 1.5
HOSTS = {"host": False, "host with flash-qla": True}
"""Whether fla gives it the rule."""
SAME = 3e-2
"""Relative error of two bf16 outputs whose gates are fp32 in one and bf16 in the other."""


def build_ours(cfg: Qwen35Config, groups, mode: str = "chunkwise") -> torch.nn.Module:
    """The layer of the spec that users name."""
    spec = getattr(layer_specs, f"get_qwen35_{mode}_cp_spec")(cfg).layer_specs[0].submodules.self_attention
    return build_module(spec, config=cfg, layer_number=1, pg_collection=groups).to(runs.DEVICE)


def build_host(tiny: bool, groups, ours: torch.nn.Module) -> torch.nn.Module:
    """The host's layer with our layer's weights; norm weights are their starting values in both."""
    cfg = host_model.config(tiny)
    host_model.run_here()
    layer = build_module(host_model.gdn_spec(), config=cfg, layer_number=1, pg_collection=groups)
    layer = layer.to(runs.DEVICE).bfloat16()  # as the host's Float16Module does
    host_model.copy_weights(layer, ours, but="out_norm")
    return layer


def host_forward(host: torch.nn.Module, hidden: Tensor, params: PackedSeqParams | None, flash_qla: bool):
    """The host's output, its rule on FlashQLA or on fla's own kernels."""
    with fla_with_flash_qla(flash_qla):
        return host(hidden, None, packed_seq_params=params)[0]


def host_params(params: StreamParams) -> PackedSeqParams:
    """What the host's layer is given for the same documents."""
    names = ("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    return PackedSeqParams(**{name: getattr(params, name) for name in names})


def plain_layer(layer: torch.nn.Module, rows: Rows) -> Callable[[Tensor], Tensor]:
    """The same operations on the same weights, written down without any context parallelism."""
    key_heads, value_heads = layer.num_key_heads, layer.num_value_heads
    qkv_dim, ba_dim = 2 * layer.qk_dim + layer.v_dim, 2 * value_heads

    def forward(hidden: Tensor) -> Tensor:
        projected = layer.in_proj(hidden)[0].transpose(0, 1)
        qkv, z, ba = projected.split([qkv_dim, layer.v_dim, ba_dim], dim=-1)
        q, k, v = causal_conv1d_silu(
            qkv,
            layer.conv1d.weight.squeeze(1),
            rows,
            sizes=(layer.qk_dim, layer.qk_dim, layer.v_dim),
            norm_dims=(layer.key_head_dim, layer.key_head_dim, None),
        )
        b, a = ba.chunk(2, dim=-1)
        q, k = (x.unflatten(-1, (key_heads, -1)) for x in (q, k))
        v, z = (x.unflatten(-1, (value_heads, -1)) for x in (v, z))
        out = gated_delta_rule(q, k, v, a, b, layer.A_log, layer.dt_bias, rows)
        norm = layer.out_norm
        out = gated_rms_norm(out, z, norm.weight, norm.eps, norm.zero_centered)
        return layer.out_proj(out.flatten(-2).transpose(0, 1))[0]

    return forward


def both_ways(forward: Callable[[], Tensor], *leaves: Tensor) -> Callable[[], None]:
    """Forward and backward to every leaf, gradients given up."""
    upstream = torch.randn_like(forward().detach())

    def run() -> None:
        torch.autograd.grad(forward(), leaves, upstream)

    return run


def rule_alone(layer: torch.nn.Module, rows: Rows) -> Callable[[], None]:
    """The rule on random tensors of the layer's shapes."""
    heads = {"q": layer.num_key_heads, "k": layer.num_key_heads, "v": layer.num_value_heads}
    shape = (rows.num_rows, rows.row_len)
    make = {"device": runs.DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    qkv = [torch.randn(*shape, n, layer.key_head_dim, **make) for n in heads.values()]
    qkv[:2] = (F.normalize(x.detach(), dim=-1).requires_grad_() for x in qkv[:2])
    gates = [torch.randn(*shape, layer.num_value_heads, **make) for _ in range(2)]
    leaves = (*qkv, *gates, layer.A_log, layer.dt_bias)
    return both_ways(lambda: gated_delta_rule(*leaves, rows), *leaves)


def floor_parts(layer: torch.nn.Module, tokens: int, ceilings: runs.Ceilings) -> tuple[float, float]:
    """Milliseconds of the two projections, and of what convolution and gated norm must read and write.

    Convolution: in and out forward; input, upstream and result backward. Norm: likewise two inputs.
    """
    weights = layer.in_proj.weight.numel() + layer.out_proj.weight.numel()
    channels = 5 * (2 * layer.qk_dim + layer.v_dim) + 8 * layer.v_dim
    return ceilings.floor_parts(tokens, weights, channels)


def measure(report: runs.LiveReport, tiny: bool, ceilings: runs.Ceilings, groups) -> list[str]:
    """Ours, the host's and the plain layer on dense and packed streams; returns the bounds missed."""
    tokens = 256 if tiny else TOKENS
    cfg, missed = runs.model_config(tiny), []
    layer = build_ours(cfg, groups)
    host = build_host(tiny, groups, layer)
    hidden = torch.randn(tokens, 1, cfg.hidden_size, device=runs.DEVICE, dtype=torch.bfloat16)
    hidden.requires_grad_()
    report.table(
        f"{tokens:,} tokens, one rank",
        ["layer", "ms", "host's time / this", "of the floor", "peak, GiB", "launches", "copies", "syncs"],
    )
    for kind, documents in {"dense": 1, "packed": DOCUMENTS}.items():
        sample = runs.make_sample(runs.uneven_lengths(tokens, documents), 8)
        params = cut_microbatch(
            sample, packed=documents > 1, layout=cfg.cp_layout, cp_size=1, cp_rank=0, device=runs.DEVICE
        ).params
        rows = params.plan.stream_rows
        plain, theirs = plain_layer(layer, rows), host_params(params) if documents > 1 else None
        # The host's packed streams need GPU kernels.
        hosts = {} if runs.RUNS_ON_CPU and documents > 1 else HOSTS
        forwards = {
            name: (host, lambda theirs=theirs, on=on: host_forward(host, hidden, theirs, on))
            for name, on in hosts.items()
        } | {
            "ours, CP 1": (layer, lambda params=params: layer(hidden, packed_seq_params=params)[0]),
            "ours without CP code": (layer, lambda plain=plain: plain(hidden)),
        }
        products, traffic = floor_parts(layer, tokens, ceilings)
        floor = products + runs.milliseconds(rule_alone(layer, rows)) + traffic
        outputs, times, counts = {}, {}, {}
        for name, (module, forward) in forwards.items():
            outputs[name] = forward().detach()
            run = both_ways(forward, hidden, *module.parameters())
            times[name], counts[name] = runs.milliseconds(run), runs.count(run)
            faster = f"{times['host'] / times[name]:.2f}" if "host" in times else "-"
            figures = [
                f"{times[name]:.2f}",
                faster,
                f"{times[name] / floor:.2f}",
                f"{runs.peak_gib(run):.2f}",
            ]
            report.row(f"{name}, {kind}", *figures, *counts[name])
        report.row(f"floor, {kind}", f"{floor:.2f}", "", "1", "", "", "", "")
        for name, output in outputs.items():
            if (error := runs.relative_error(output, outputs["ours, CP 1"])) > SAME:
                raise RuntimeError(f"{name}, {kind}: output differs from ours by {error:.1e}")
        missed += missed_bounds(kind, times, counts, floor)
    return missed


def missed_bounds(
    kind: str, times: dict[str, float], counts: dict[str, runs.Counts], floor: float
) -> list[str]:
    """What falls short of what this table must show, in words."""
    short = runs.missed_times(times.get("host"), times["ours, CP 1"], floor, TIMES_FASTER, TIMES_FLOOR)
    missed = [f"{kind}: {what}" for what in short]
    with_cp, without = counts["ours, CP 1"], counts["ours without CP code"]
    if with_cp.launches > without.launches or with_cp.copies > without.copies:
        missed.append(f"{kind}: CP 1 makes {with_cp}, a layer without CP code {without}")
    return missed


def measure_shares(report: runs.LiveReport, tiny: bool) -> None:
    """One rank's share of a stream CP times as long, its kernels alone: no other rank, no network."""
    tokens = 256 if tiny else TOKENS
    report.table(
        f"One rank's share of CP {CP}: {tokens:,} tokens of a dense stream of {CP * tokens:,}, kernels only",
        ["layer", "ms", "peak, GiB"],
    )
    cfg = runs.model_config(tiny, context_parallel_size=CP)
    for mode in ("chunkwise", "headwise"):
        with runs.one_rank(cp=CP, rank=1) as groups:
            layer = build_ours(cfg, groups, mode)
            hidden = torch.randn(tokens, 1, cfg.hidden_size, device=runs.DEVICE, dtype=torch.bfloat16)
            hidden.requires_grad_()
            run = both_ways(lambda: layer(hidden)[0], hidden, *layer.parameters())  # noqa: B023
            report.row(
                f"{mode}, {cfg.cp_layout}", f"{runs.milliseconds(run):.2f}", f"{runs.peak_gib(run):.2f}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the tables."""
    arguments = runs.read_arguments(__doc__, argv)
    ceilings = runs.Ceilings.measure()
    report = runs.LiveReport(
        arguments.results,
        "gdn_layer",
        "# The GatedDeltaNet layer",
        "",
        *__doc__.split("\n\n")[2:4],
        "",
        f"Floor: the two projections at the measured matmul rate, the rule alone as measured here, and what "
        f"convolution and gated norm must read and write at the measured bandwidth. Bounds: at least "
        f"{TIMES_FASTER:g} times the host's speed, at most {TIMES_FLOOR:g} times the floor, and no launch or "
        f"copy more than the same operations without CP code. Packed: {DOCUMENTS} documents of random "
        "lengths. Peak: beyond weights and input, gradients included.",
        "",
        ceilings.text(),
    )
    with runs.one_rank() as groups:
        missed = measure(report, arguments.tiny, ceilings, groups)
    status = report.verdict(missed)
    runs.empty_cache()
    measure_shares(report, arguments.tiny)
    return status


if __name__ == "__main__":
    sys.exit(main())
