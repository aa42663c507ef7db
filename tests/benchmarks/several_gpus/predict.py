"""What the figures should be, written down before they are measured: bytes, FLOPs, and rates of one GPU.

The rates of kernels were measured on one H200; what is assumed says so. The layers are those of this package
as it stands: the rule on FlashQLA where it is not said otherwise, attention on cuDNN, norms and gates in
plain torch, all experts in one product; attention's communication behind its computation, that of
GatedDeltaNet not.

Legend: S tokens of the stream, t = S / GPUs of one rank.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_gdn.comm_volume import chunkwise_bytes, headwise_bytes
from megatron_gdn.config import SIZES, Qwen35Config, count_parameters
from megatron_gdn.gated_delta_net_cp import Sections
from tests.benchmarks.several_gpus.cases import ATTENTION, GDN, HOST, SLICE, Case, Work

GIB = 2**30
KB = 1000.0


class Rule(NamedTuple):
    """Kernels of the gated delta rule, forward and backward, value heads of 128 x 128."""

    seconds: float
    """Per token and head, where there are 32."""
    peak: float
    """Bytes per token and head, at the peak of the backward pass."""
    state_passing: float
    """How many times as long it takes with summaries of spans made first."""
    sequential: float
    """Share of the time that fewer heads do not shorten: kernels that follow the stream chunk by chunk."""


# Medians of one run each on one H200, 131,072 tokens; the last two columns of fla are assumed.
_MEASURED = 131_072 * 32
RULES = {
    "flash_qla": Rule(12.2e-3 / _MEASURED, 8_281 * 2**20 / _MEASURED, 18.4 / 12.2, 0.0),
    "fla": Rule(34.0e-3 / _MEASURED, 15_456 * 2**20 / _MEASURED, 2.5, 0.4),
    HOST: Rule(37.8e-3 / _MEASURED, 18_000 * 2**20 / _MEASURED, 1.0, 0.4),
}
CONV = 9.43e-3 / (131_072 * 8192)
"""Seconds per token and channel of the convolution, forward and backward."""
ATTENTION_WHOLE, ATTENTION_BLOCKS = 433e12, 383e12
"""FLOP/s of cuDNN at head dim 256, causal, forward and backward; and on earlier keys, as CP needs."""

# Assumed shares of measured or stated peaks.
MATMUL = 0.8 * 772e12
"""FLOP/s: of an 8192^3 product."""
EXPERTS = 0.6 * 772e12
"""FLOP/s of products with some thousand rows."""
MEMORY = 0.8 * 4.24e12
"""Byte/s, read and written: of a device copy."""
LINK = 350e9
"""Byte/s that a GPU sends to others in one direction, of NVLink 4's 450 GB/s."""
LATENCY = 20e-6
"""Seconds per collective."""
USABLE = 136 * GIB
"""Of 139 GiB."""

# Bytes that plain torch reads and writes per token, forward and backward, counted from the code.
GATED_NORM = 20 * 4 * 4096.0
EXCHANGE_COPIES = 4 * 2 * 2 * 12_352.0
"""Once before and once after each all-to-all."""
ROPE_AND_NORMS = 24 * 4 * 4096.0
TWO_NORMS = 40 * 4 * 2048.0
"""Of a TransformerLayer."""
PERMUTE = 8 * 12 * 2 * 2048.0 + 8 * 10 * 2 * 1536.0
"""Of tokens to 8 experts and back, and SwiGLU."""

# Bytes that are alive per token: kept for backward, or at the peak of it.
GDN_KEPT, GDN_PEAK = 147 * KB, 115 * KB
"""The peak without the rule's own."""
ATTENTION_KEPT, ATTENTION_PEAK = 90 * KB, 165 * KB
FEED_FORWARD_KEPT = 111 * KB
BOUNDARY = 2 * 2048.0


class Prediction(NamedTuple):
    """Of one training step, forward and backward."""

    seconds: float
    communication: float
    """Seconds of it that computation does not hide."""
    sent_bytes: float
    """By the rank that sends most."""
    peak_bytes: float


@dataclass(frozen=True)
class Shape:
    """The sizes of the layers that enter."""

    hidden: int
    sections: Sections
    queries: int
    """Channels."""
    keys: int
    experts: int
    expert_width: int
    active_experts: int
    parameters: int
    """Of 4 layers, without vocabulary."""

    @classmethod
    def of(cls, size: str) -> "Shape":
        """Those of a released MoE size."""
        fields = SIZES[size].fields
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        config = Qwen35Config.from_size(size, num_layers=4)
        return cls(
            hidden=fields["hidden_size"],
            sections=Sections(*(fields[f"linear_{name}"] for name in names)),
            queries=fields["num_attention_heads"] * fields["kv_channels"],
            keys=fields["num_query_groups"] * fields["kv_channels"],
            experts=fields["num_moe_experts"],
            expert_width=fields["moe_ffn_hidden_size"],
            active_experts=fields["moe_router_topk"] + 1,
            parameters=count_parameters(config, vocab_size=0, tied=True)[0],
        )


def predict(case: Case, shape: Shape) -> Prediction:
    """One line of the table of strong scaling."""
    return {GDN: _gdn, ATTENTION: _attention, SLICE: _slice}[case.work.module](case, shape)


def _gdn(case: Case, shape: Shape) -> Prediction:
    """Of a GatedDeltaNet layer."""
    t, n, sections = case.tokens // case.gpus, case.gpus, shape.sections
    host, heads = case.work.way == HOST, sections.value_heads
    rule = RULES[HOST if host else case.work.backend or "flash_qla"]
    convolved, values = sum(sections.sizes[:3]), heads * sections.value_dim
    projected = sum(sections.sizes) + values
    products = 6 * t * shape.hidden * (projected + values) / MATMUL + t * convolved * CONV
    moved, peak, sent = GATED_NORM, GDN_PEAK + rule.peak * heads, 0
    recurrence = t * heads * rule.seconds
    if n > 1 and case.work.way == "chunkwise":
        recurrence *= rule.state_passing
        # fla keeps the states of all chunks, and those of the summaries have K + V channels in place of V
        peak += 1.5 * rule.peak * heads if case.work.backend == "fla" else 0
        sent = 2 * max(chunkwise_bytes(sections, n, rank) for rank in range(n))
    elif n > 1:
        recurrence *= 1 - rule.sequential + rule.sequential * n
        moved += EXCHANGE_COPIES
        peak += 4.0 * projected
        sent = 2 * headwise_bytes(sections, t, n)
        if host:  # it sends the output gate too, sorts all channels first, and copies more often
            sent += 2 * 2 * values * t * (n - 1) // n
            moved += EXCHANGE_COPIES * 2
    exposed = sent / LINK + 6 * LATENCY if n > 1 else 0.0
    return Prediction(products + recurrence + t * moved / MEMORY + exposed, exposed, sent, t * peak)


def _attention(case: Case, shape: Shape) -> Prediction:
    """Of an attention layer."""
    t, n = case.tokens // case.gpus, case.gpus
    projected = 2 * shape.queries + 2 * shape.keys
    rest = 6 * t * shape.hidden * (projected + shape.queries) / MATMUL + t * ROPE_AND_NORMS / MEMORY
    flops = 7 * case.tokens * t * shape.queries  # half of all pairs, 7 products of 2
    kernels = flops / (ATTENTION_WHOLE if n == 1 else ATTENTION_BLOCKS)
    sent, exposed, peak = 0, 0.0, t * ATTENTION_PEAK
    if n > 1:
        # In zigzag rank r sends (n - 1 + r) t / 2 keys and values, twice, in bf16, and the gradients of
        # (2 n - 2 - r) t / 2 in fp32: the same for all.
        sent = (n - 1) * t * 2 * shape.keys * 6
        # One gathering has only the rank's own squares to hide behind; turns have all but the last block.
        hidden = kernels / (2 * n) if case.work.way == "all_gather" else kernels * (n - 1) / n
        exposed = max(sent / LINK - hidden, 0.0) + 4 * LATENCY
        peak += (case.tokens if case.work.way == "all_gather" else 2 * t) * 2 * shape.keys * 6
    return Prediction(rest + kernels + exposed, exposed, sent, peak)


def _feed_forward(t: int, shape: Shape) -> float:
    """Seconds of the router, the experts and the shared expert of one layer, and of the layer's norms."""
    products = shape.active_experts * 3 * shape.expert_width + shape.experts
    seconds = 6 * t * shape.hidden * products / EXPERTS
    weights = (
        2 * shape.experts * 3 * shape.expert_width * shape.hidden
    )  # read twice, gradients read and written
    return max(seconds, 4 * weights / MEMORY) + t * (PERMUTE + TWO_NORMS) / MEMORY


def _slice(case: Case, shape: Shape) -> Prediction:
    """Three GatedDeltaNet layers and one attention layer, the forward pass run twice."""
    gdn = _gdn(case._replace(work=Work(GDN, case.work.way)), shape)
    attention = _attention(case._replace(work=Work(ATTENTION, "p2p")), shape)
    layers = (gdn, gdn, gdn, attention)
    compute = sum(layer.seconds - layer.communication for layer in layers)
    compute += 4 * _feed_forward(case.tokens // case.gpus, shape)
    exposed = 1.5 * 3 * gdn.communication + 4 / 3 * attention.communication
    return Prediction(
        compute * 4 / 3 + exposed,
        exposed,
        # a third of what attention's last rank sends is forward
        1.5 * 3 * gdn.sent_bytes + 4 / 3 * attention.sent_bytes,
        _slice_bytes(gdn.peak_bytes, case.tokens // case.gpus, shape, recompute=True),
    )


def _slice_bytes(gdn_peak: float, t: int, shape: Shape, recompute: bool) -> float:
    """Weights and gradients in bf16, what layers keep, and the peak of one layer's backward pass."""
    kept = 4 * BOUNDARY if recompute else 3 * GDN_KEPT + ATTENTION_KEPT + 4 * FEED_FORWARD_KEPT
    return 4 * shape.parameters + t * (kept + FEED_FORWARD_KEPT) + gdn_peak


def longest_stream(gpus: int, recompute: bool, shape: Shape) -> int:
    """Tokens of the longest stream, headwise."""
    t = 2**12
    gdn_peak = predict(Case(Work(GDN, "headwise"), t * gpus, gpus), shape).peak_bytes
    fixed = 4 * shape.parameters
    per_token = (_slice_bytes(gdn_peak, t, shape, recompute) - fixed) / t
    return int((USABLE - fixed) / per_token) * gpus
