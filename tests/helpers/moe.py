"""A small MoE layer: its weights, the truth about it, and what each rank holds of it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.config import Qwen35Config

HIDDEN, FFN, EXPERTS, TOPK = 32, 16, 8, 2


def moe_config(*, tp: int = 1, ep: int = 1, etp: int = 1, **overrides) -> Qwen35Config:
    """A config whose MoE layers have the sizes above, and no auxiliary loss."""
    return Qwen35Config.from_size(
        "debug",
        **{
            "hidden_size": HIDDEN,
            "moe_ffn_hidden_size": FFN,
            "moe_shared_expert_intermediate_size": FFN,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOPK,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            "use_cpu_initialization": True,
            "perform_initialization": False,
            "transformer_impl": "local",
            **overrides,
        },
    )


def random_weights(idle: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Weights of all experts, float64; no token that ends in 1 goes to the experts in `idle`."""
    weights = {
        "router": torch.randn(EXPERTS, HIDDEN),
        "fc1": torch.randn(EXPERTS, 2 * FFN, HIDDEN) / HIDDEN**0.5,
        "fc2": torch.randn(EXPERTS, HIDDEN, FFN) / FFN**0.5,
        "shared_fc1": torch.randn(2 * FFN, HIDDEN) / HIDDEN**0.5,
        "shared_fc2": torch.randn(HIDDEN, FFN) / FFN**0.5,
        "shared_gate": torch.randn(1, HIDDEN) / HIDDEN**0.5,
    }
    weights["router"][:, -1] = 0
    weights["router"][list(idle), -1] = -100
    return {name: weight.double() for name, weight in weights.items()}


def random_tokens(*shape: int) -> Tensor:
    """Hidden states [*shape, HIDDEN] that end in 1, float64."""
    tokens = torch.randn(*shape, HIDDEN, dtype=torch.float64)
    tokens[..., -1] = 1
    return tokens


def swiglu(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    gate, up = (x @ fc1.t()).chunk(2, -1)
    return (F.silu(gate) * up) @ fc2.t()


def moe_reference(tokens: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """One token after another, one expert after another; [T, HIDDEN]."""
    outputs = []
    for token in tokens:
        scores, chosen = (weights["router"] @ token).topk(TOPK)
        output = torch.sigmoid(weights["shared_gate"] @ token) * swiglu(
            token, weights["shared_fc1"], weights["shared_fc2"]
        )
        for weight, e in zip(scores.softmax(0), chosen.tolist(), strict=True):
            output = output + weight * swiglu(token, weights["fc1"][e], weights["fc2"][e])
        outputs.append(output)
    return torch.stack(outputs)


NAMES = {
    "router.weight": "router",
    "experts.linear_fc1.weight": "fc1",
    "experts.linear_fc2.weight": "fc2",
    "shared_experts.linear_fc1.weight": "shared_fc1",
    "shared_experts.linear_fc2.weight": "shared_fc2",
    "shared_experts.gate_weight": "shared_gate",
}
"""Parameters of our layer, and their weights above."""


def part_of_rank(name: str, whole: Tensor, groups) -> Tensor:
    """What this rank holds of a weight, or of its gradient."""
    ep, etp, tp = groups.ep, groups.expt_tp, groups.tp
    if name in ("fc1", "fc2"):
        whole, group = whole.chunk(ep.size())[ep.rank()], etp
    else:
        group = tp
    if name.endswith("fc1"):
        gate, up = whole.chunk(2, -2)
        return torch.cat([half.chunk(group.size(), -2)[group.rank()] for half in (gate, up)], -2)
    return whole.chunk(group.size(), -1)[group.rank()] if name.endswith("fc2") else whole
