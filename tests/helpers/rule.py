"""Random input of the gated delta rule, its gradients, and the ranks' exchange in one process."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.reference import l2_normalise

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias")


def rule_inputs(case, sizes) -> list[Tensor]:
    """Random q, k, v, a, b, A_log, dt_bias in float64, exact in float32, decay from weak to strong."""
    h, H, K, V = sizes
    shape = (case.batch, case.seq_len)
    return [
        torch.randn(*shape, h, K).double(),
        torch.randn(*shape, h, K).double(),
        torch.randn(*shape, H, V).double(),
        torch.randn(*shape, H).double(),
        torch.randn(*shape, H).double(),
        torch.linspace(-4, 2.7, H).double(),
        torch.randn(H).double(),
    ]


def normalised(leaves: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """`rule_inputs` as the rule wants them, q and k of length one, in `dtype` or v's; differentiable."""
    q, k = (l2_normalise(x.float()).to(dtype or leaves[2].dtype) for x in leaves[:2])
    return [q, k, *leaves[2:]]


def with_grads(function, inputs, upstream) -> list[Tensor]:
    """Output and the gradient of every input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def scan_in_stream_order(summaries: Tensor, reverse: bool = False) -> Tensor:
    """What the ranks' exchange does, for rows that are consecutive spans held in one process."""
    key_dim = summaries.shape[-2]
    state, entering = torch.zeros_like(summaries[0, ..., key_dim:]), []
    for row in reversed(summaries.unbind()) if reverse else summaries:
        entering.append(state)
        state = row[..., :key_dim] @ state + row[..., key_dim:]
    return torch.stack(entering[::-1] if reverse else entering)
