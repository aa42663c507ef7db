"""Random input of the gated delta rule, its gradients, and the ranks' exchange in one process."""

from collections.abc import Callable, Sequence

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


class ScanInStreamOrder:
    """What the ranks' exchange does, for rows that are consecutive spans held in one process."""

    def __call__(self, summaries: Tensor) -> Tensor:
        return torch.stack(_before(summaries.unbind()))

    def start_reverse(self, summaries: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.stack(_before(summaries.unbind()[::-1])[::-1])


def _before(summaries: Sequence[Tensor]) -> list[Tensor]:
    """State before each of the rows, in the order given."""
    key_dim = summaries[0].shape[-2]
    state, entering = torch.zeros_like(summaries[0][..., key_dim:]), []
    for row in summaries:
        entering.append(state)
        state = row[..., :key_dim] @ state + row[..., key_dim:]
    return entering
