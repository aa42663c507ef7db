"""Cases of what is not a sequence mixer: norms, RoPE, gates, the experts of an MoE layer, the loss."""

import torch
from torch import Tensor

from megatron_gdn.self_test.cases import Case, Setup, Source, differentiated

TOKENS = 256


def norm(setup: Setup, source: Source) -> Case:
    """Zero-centred RMSNorm over the hidden size."""
    from megatron_gdn.ops.norms import rms_norm

    return Case(
        _triton(setup),
        {"x": source.normal(TOKENS, setup.hidden), "weight": source.normal(setup.hidden)},
        differentiated(lambda x, weight: rms_norm(x, weight, setup.eps, True)),
        differentiated(lambda x, weight: _normalised(x, setup.eps) * (1 + weight)),
        source.normal(TOKENS, setup.hidden),
    )


def gated_norm(setup: Setup, source: Source) -> Case:
    """The norm of the rule's output, with its gate; the weight is fp32 in every model."""
    from megatron_gdn.ops.norms import gated_rms_norm

    shape = TOKENS, setup.value_heads, setup.value_head_dim
    weight = source.normal(setup.value_head_dim, dtype=torch.float32)
    return Case(
        _triton(setup),
        {"x": source.normal(*shape), "gate": source.normal(*shape), "weight": weight},
        differentiated(lambda x, gate, weight: gated_rms_norm(x, gate, weight, setup.eps, True)),
        differentiated(
            lambda x, gate, weight: _normalised(x, setup.eps) * (1 + weight) * gate * gate.sigmoid()
        ),
        source.normal(*shape),
    )


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def queries_and_keys(setup: Setup, source: Source) -> Case:
    """From the projection of an attention layer to queries and keys, normed and turned, gates and values."""
    from megatron_gdn.ops.qk_norm_rope import split_norm_rope

    dim, half, groups = setup.head_dim, setup.rot_dim // 2, setup.kv_heads
    heads = setup.heads // groups
    kinds = 2 if setup.output_gate else 1
    position = source.numbers(TOKENS, 100_000).double()
    angles = torch.outer(
        position, 1e7 ** -torch.linspace(0, 1, half + 1, device=setup.device)[:half].double()
    )
    tables = [torch.cat([x, x], -1)[:, None, None].float() for x in (angles.cos(), angles.sin())]

    def ours(qkv, q_weight, k_weight):
        parts = split_norm_rope(
            qkv, dim, (q_weight, k_weight), tables, setup.eps, True, gated=setup.output_gate
        )
        return torch.cat([x.reshape(TOKENS, 1, -1) for x in parts], -1)

    def truth(qkv, q_weight, k_weight):
        *query, key, value = qkv.unflatten(-1, (-1, dim)).split([*[heads] * kinds, 1, 1], 3)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None, None, None]
        turned = []
        for x, weight in ((query[0], q_weight), (key, k_weight)):
            x = _normalised(x, setup.eps) * (1 + weight)
            pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
            turned.append(torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], -1))
        parts = turned[0], *query[1:], turned[1], value
        return torch.cat([x.reshape(TOKENS, 1, -1) for x in parts], -1)

    width = groups * (kinds * heads + 2) * dim
    return Case(
        _triton(setup),
        {
            "the projection": source.normal(TOKENS, 1, groups, width // groups),
            "the queries' weight": source.normal(dim),
            "the keys' weight": source.normal(dim),
        },
        differentiated(ours),
        differentiated(truth),
        source.normal(TOKENS, 1, width),
    )


def output_gate(setup: Setup, source: Source) -> Case:
    """The gate of attention's output."""
    from megatron_gdn.ops.output_gate import gate_output

    groups, heads = setup.kv_heads, setup.heads // setup.kv_heads
    shape = TOKENS, 1, setup.heads * setup.head_dim
    return Case(
        _triton(setup),
        {"x": source.normal(*shape), "gate": source.normal(TOKENS, 1, groups, heads, setup.head_dim)},
        differentiated(gate_output),
        differentiated(lambda x, gate: x * gate.sigmoid().flatten(2)),
        source.normal(*shape),
    )


def router(setup: Setup, source: Source) -> Case:
    """Logits in fp32 from bf16 tokens."""
    from megatron_gdn.ops.router_logits import router_logits

    return Case(
        "tensor cores" if setup.on_gpu else "torch",
        {
            "tokens": source.normal(TOKENS, setup.hidden),
            "weight": source.normal(setup.num_experts, setup.hidden),
        },
        differentiated(router_logits),
        differentiated(lambda tokens, weight: tokens @ weight.t()),
        source.normal(TOKENS, setup.num_experts, dtype=torch.float32),
    )


def rows_of_experts(setup: Setup, source: Source) -> Case:
    """Tokens to the rows of their experts, a factor on each row, and the sums back at the tokens."""
    from megatron_gdn.ops.row_sums import sum_rows

    order = source.order(TOKENS * setup.topk)
    token_of_row, rows_of_token = (order // setup.topk).unsqueeze(1), order.argsort().view(TOKENS, -1)

    def ours(x, factor):
        return sum_rows(sum_rows(x, token_of_row, rows_of_token) * factor, rows_of_token, token_of_row)

    return Case(
        _triton(setup),
        {"x": source.normal(TOKENS, setup.hidden), "factor": source.normal(len(order), 1)},
        differentiated(ours),
        differentiated(lambda x, factor: (x.unsqueeze(1) * factor[rows_of_token]).sum(1)),
        source.normal(TOKENS, setup.hidden),
    )


def swiglu(setup: Setup, source: Source) -> Case:
    """The experts' activation, with the router's weight of each row in fp32."""
    from megatron_gdn.ops.swiglu import weighted_swiglu

    def truth(x, weight):
        gate, up = x.chunk(2, -1)
        return gate * gate.sigmoid() * up * weight.unsqueeze(-1)

    return Case(
        _triton(setup),
        {
            "x": source.normal(TOKENS, 2 * setup.expert_ffn),
            "weight": source.normal(TOKENS, dtype=torch.float32),
        },
        differentiated(weighted_swiglu),
        differentiated(truth),
        source.normal(TOKENS, setup.expert_ffn),
    )


def experts(setup: Setup, source: Source) -> Case:
    """Products of up to 8 experts, one of which has no token."""
    from megatron_gdn.ops.grouped_gemm import grouped_linear

    num_experts = min(setup.num_experts, 8)
    expert = source.numbers(TOKENS, num_experts).sort().values
    expert = expert.masked_fill(expert == num_experts // 2, num_experts - 1).sort().values
    counts = torch.bincount(expert, minlength=num_experts)
    ends = counts.cumsum(0, dtype=torch.int32)

    def truth(x, weight):
        parts = zip(x.split(counts.tolist()), weight, strict=True)
        return torch.cat([part @ matrix.t() for part, matrix in parts])

    width = 2 * setup.expert_ffn
    return Case(
        "grouped_mm",
        {
            "x": source.normal(TOKENS, setup.hidden),
            "weight": source.normal(num_experts, width, setup.hidden),
        },
        differentiated(lambda x, weight: grouped_linear(x, weight, ends)),
        differentiated(truth),
        source.normal(TOKENS, width),
    )


def loss(setup: Setup, source: Source) -> Case:
    """Cross entropy from hidden states: statistics and gradients of logits, in several blocks of columns."""
    from megatron_gdn.ops.linear_cross_entropy import vocab_gradients, vocab_statistics

    vocabulary = 5000  # more than the kernels take at once
    labels = source.numbers(TOKENS, vocabulary)

    def ours(inputs, upstream):
        hidden, weight = inputs
        statistics = vocab_statistics(hidden, weight, labels, False)
        log_sum_exp = statistics.sum_exp.log() + statistics.maximum
        grads = vocab_gradients(hidden, weight, labels, log_sum_exp, upstream, True)
        return [log_sum_exp - statistics.target, *grads]

    def truth(hidden, weight):
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")

    return Case(
        _triton(setup),
        {
            "hidden": source.normal(TOKENS, setup.hidden),
            "weight": (source.normal(vocabulary, setup.hidden) * setup.hidden**-0.5),
        },
        ours,
        differentiated(truth),
        source.normal(TOKENS, dtype=torch.float32),
    )


def _triton(setup: Setup) -> str:
    return "Triton" if setup.on_gpu else "torch"
