"""The output layer, which also gives losses, without logits of the whole vocabulary in memory.

The gradient of a token's logits is softmax minus label, times what comes from above. Where the loss will be a
multiple of a known weighted sum, only one number is missing in the forward pass, so the gradients are made
there at once, some tokens after others: three products as large as the output layer's. Otherwise the logits
are made again in the backward pass: four.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from megatron_gdn.ops.linear_cross_entropy import (
    VocabStatistics,
    add_product,
    add_statistics,
    blocks,
    turn_to_gradients,
    vocab_gradients,
    vocab_statistics,
)


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
        loss_mask: Tensor | None = None,
        predict: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits as the host gives them, and its bias; with labels the loss of each token, and predictions.

        Args:
            input_: [s, B, H]; this rank's part of the tokens under sequence parallelism.
            weight: [V / tp, H], where the layer has none of its own.
            runtime_gather_output: whether logits are gathered; not with labels.
            labels: [B, S] of all tokens of the tensor-parallel ranks, int64.
            loss_mask: [B, S], a promise that what is differentiated is a multiple of
                sum(losses * loss_mask). It makes the backward pass a quarter cheaper, for a gradient of the
                weight in fp32 that is kept until then. Breaking it is an error in the backward pass.
            predict: whether predictions are wanted.

        Returns:
            with labels, losses [B, S] in fp32, differentiable, and, if wanted, the most likely token of each.

        Communication: with labels and tensor parallelism, two all-reduces of one and two numbers per token,
        in blocks of tokens with loss_mask, a third for predictions; for the hidden states what the host's
        linear does, an all-gather and a reduce-scatter under sequence parallelism, else an all-reduce of
        their gradient.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        group = _Group(self.tp_group, self.sequence_parallel)
        by_token = [None if x is None else x.t().contiguous() for x in (labels, loss_mask)]
        # Gradients before they are scaled would be too small for fp16.
        if loss_mask is None or weight.dtype == torch.float16 or not torch.is_grad_enabled():
            losses, best = _Losses.apply(input_, weight, by_token[0], group, predict)
        else:
            losses, best = _LossesAndGradients.apply(input_, weight, *by_token, group, predict)
        return losses.t().contiguous(), best.t().contiguous() if predict else None


class _Group:
    """Tensor-parallel ranks, each with a part of the vocabulary and all of the tokens, or a part of them."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool):
        self.group, self.sequence_parallel = group, sequence_parallel

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM) -> None:
        if self.group.size() > 1:
            dist.all_reduce(tensor, op, self.group)

    def all_tokens(self, hidden: Tensor) -> Tensor:
        """[s, B, H] of this rank to [S * B, H] of all ranks."""
        if not self.sequence_parallel:
            return hidden.contiguous().flatten(0, 1)
        whole = hidden.new_empty(hidden.shape[0] * self.group.size(), *hidden.shape[1:])
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self.group)
        return whole.flatten(0, 1)

    def sum_of_gradients(self, d_whole: Tensor, hidden: Tensor) -> Tensor:
        """Every rank's share [S * B, H] of the gradient to the gradient of this rank's `hidden`."""
        d_whole = d_whole.to(hidden.dtype)
        if not self.sequence_parallel:
            self.all_reduce(d_whole)
            return d_whole.view_as(hidden)
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(d_hidden.flatten(0, 1), d_whole, group=self.group)
        return d_hidden

    def losses(self, local: VocabStatistics, first: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Losses, log of the sum of exponentials, best token, from statistics of every rank's vocabulary."""
        high = local.maximum.clone()
        self.all_reduce(high, dist.ReduceOp.MAX)
        # The label's logit counts from the maximum; a label that no rank has (masked) counts as nothing.
        target = torch.where(local.target > -torch.inf, local.target - high, 0.0)
        sums = torch.stack([local.sum_exp * (local.maximum - high).exp(), target])
        self.all_reduce(sums)
        log_sum = sums[0].log()
        best = local.best
        if best is not None:
            best = torch.where(local.maximum == high, best + first, torch.iinfo(best.dtype).max)
            self.all_reduce(best, dist.ReduceOp.MIN)
        return log_sum - sums[1], log_sum + high, best


class _Losses(torch.autograd.Function):
    """Hidden states [s, B, H] and labels [S, B] to losses and predictions [S, B]."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, group: _Group, predict: bool):
        first = group.group.rank() * len(weight)
        local_labels = labels.flatten() - first
        statistics = vocab_statistics(group.all_tokens(hidden), weight, local_labels, predict)
        losses, log_sum_exp, best = group.losses(statistics, first)
        ctx.group = group
        ctx.save_for_backward(hidden, weight, local_labels, log_sum_exp)
        return losses.view_as(labels), _not_differentiable(ctx, best, labels)

    @staticmethod
    def backward(ctx, upstream: Tensor, _):
        hidden, weight, labels, log_sum_exp = ctx.saved_tensors
        upstream = upstream.to(log_sum_exp.dtype).flatten().contiguous()
        whole = ctx.group.all_tokens(hidden)
        with_weight = ctx.needs_input_grad[1]
        d_whole, d_weight = vocab_gradients(whole, weight, labels, log_sum_exp, upstream, with_weight)
        return ctx.group.sum_of_gradients(d_whole, hidden), d_weight, None, None, None


class _LossesAndGradients(torch.autograd.Function):
    """The same with gradients of sum(losses * weights) made at once; `weights` [S, B]."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, group: _Group, predict: bool
    ):
        first = group.group.rank() * len(weight)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        whole, weights = group.all_tokens(hidden), weights.flatten().to(dtype)
        d_whole = torch.zeros_like(whole, dtype=dtype)
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        losses, bests = [], []
        for tokens in blocks(len(whole), len(weight) * weight.element_size()):
            logits = whole[tokens] @ weight.t()
            local_labels = labels.flatten()[tokens] - first
            statistics = VocabStatistics.of_nothing(local_labels, dtype, predict)
            add_statistics(logits, local_labels, 0, statistics)
            loss, log_sum_exp, best = group.losses(statistics, first)
            turn_to_gradients(logits, local_labels, 0, log_sum_exp, weights[tokens])
            add_product(d_whole[tokens], logits, weight)
            if d_weight is not None:
                add_product(d_weight, logits.t(), whole[tokens])
            del logits
            losses.append(loss)
            bests.append(best)
        ctx.group, ctx.dtype = group, weight.dtype
        ctx.save_for_backward(hidden, d_whole, d_weight, weights)
        best = torch.cat(bests) if predict else None
        return torch.cat(losses).view_as(labels), _not_differentiable(ctx, best, labels)

    @staticmethod
    def backward(ctx, upstream: Tensor, _):
        hidden, d_whole, d_weight, weights = ctx.saved_tensors
        factor = _factor(upstream.to(weights.dtype).flatten(), weights)
        if d_weight is not None:
            d_weight = torch.mul(d_weight, factor, out=torch.empty_like(d_weight, dtype=ctx.dtype))
        return ctx.group.sum_of_gradients(d_whole * factor, hidden), d_weight, None, None, None, None


def _factor(upstream: Tensor, weights: Tensor) -> Tensor:
    """The number with upstream = number * weights, found and checked without waiting for the GPU."""
    largest = weights.abs().argmax()
    factor = torch.where(weights[largest] == 0, 0.0, upstream[largest] / weights[largest])
    error = (upstream - factor * weights).abs().amax()
    torch._assert_async(
        (error > 1e-5 * upstream.abs().amax()).logical_not(),  # what is not finite is for the host to report
        "the loss that is differentiated is no multiple of sum(losses * loss_mask); do not give the model "
        "loss_mask, or weigh its losses with it.",
    )
    return factor


def _not_differentiable(ctx, best: Tensor | None, labels: Tensor) -> Tensor | None:
    if best is None:
        return None
    best = best.view_as(labels)
    ctx.mark_non_differentiable(best)
    return best
