"""The output layer, which also gives losses, without logits of the whole vocabulary in memory."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from megatron_gdn.ops.linear_cross_entropy import vocab_gradients, vocab_statistics


class OutputLayer(ColumnParallelLinear):
    """The host's output layer with a loss of its own; parameters and keys are the host's.

    Losses go through the module's call, as logits do, because the host's data parallelism waits there for
    the weights (--overlap-param-gather).
    """

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits as the host gives them, and its bias; with labels the loss of each token, and predictions.

        Args:
            input_: [s, B, H]; this rank's part of the tokens under sequence parallelism.
            weight: [V / tp, H], where the layer has none of its own.
            runtime_gather_output: whether logits are gathered; not with labels.
            labels: [B, S] of all tokens of the tensor-parallel ranks, int64.

        Returns:
            with labels, losses [B, S] in fp32, differentiable, and the most likely token of each, [B, S].

        Communication: with labels and tensor parallelism, three all-reduces of a number per token; for the
        hidden states what the host's linear does, an all-gather and a reduce-scatter under sequence
        parallelism, else an all-reduce of their gradient.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        losses, best = _LinearCrossEntropy.apply(
            input_, weight, labels.t().contiguous(), self.tp_group, self.sequence_parallel
        )
        return losses.t().contiguous(), best.t().contiguous()


class _LinearCrossEntropy(torch.autograd.Function):
    """Hidden states [s, B, H] and labels [S, B] to losses and predictions [S, B]."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, group, sequence_parallel: bool):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        whole = _all_tokens(hidden, group, sequence_parallel).flatten(0, 1)
        first = group.rank() * len(weight)
        local_labels = labels.flatten() - first
        maximum, sum_exp, target, best = vocab_statistics(whole, weight, local_labels)
        high = maximum.clone()
        _all_reduce(high, group, dist.ReduceOp.MAX)
        # The label's logit counts from the maximum; a label that no rank has (masked) counts as nothing.
        target = torch.where(target.isfinite(), target - high, 0.0)
        both = torch.stack([sum_exp * (maximum - high).exp(), target])
        _all_reduce(both, group)
        best = torch.where(maximum == high, best + first, torch.iinfo(best.dtype).max)
        _all_reduce(best, group, dist.ReduceOp.MIN)
        log_sum = both[0].log()
        ctx.save_for_backward(hidden, weight, local_labels, log_sum + high)
        best = best.view_as(labels)
        ctx.mark_non_differentiable(best)
        return (log_sum - both[1]).view_as(labels), best

    @staticmethod
    def backward(ctx, upstream: Tensor, _):
        hidden, weight, labels, log_sum_exp = ctx.saved_tensors
        whole = _all_tokens(hidden, ctx.group, ctx.sequence_parallel)
        upstream = upstream.to(log_sum_exp.dtype).flatten().contiguous()
        d_whole, d_weight = vocab_gradients(
            whole.flatten(0, 1), weight, labels, log_sum_exp, upstream, ctx.needs_input_grad[1]
        )
        d_whole = d_whole.to(hidden.dtype).view_as(whole)
        if ctx.sequence_parallel:
            d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            dist.reduce_scatter_tensor(d_hidden, d_whole, group=ctx.group)
        else:
            d_hidden = d_whole
            _all_reduce(d_hidden, ctx.group)
        return d_hidden, d_weight, None, None, None


def _all_reduce(tensor: Tensor, group, op=dist.ReduceOp.SUM) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op, group)


def _all_tokens(hidden: Tensor, group, sequence_parallel: bool) -> Tensor:
    """[s, B, H] of this rank to [S, B, H] of all ranks of the group."""
    if not sequence_parallel:
        return hidden.contiguous()
    whole = hidden.new_empty(hidden.shape[0] * group.size(), *hidden.shape[1:])
    dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
    return whole
