"""Cross entropy of an output layer over a part of the vocabulary, never with all logits in memory.

Logits are made for a block of the vocabulary at a time, once to sum their exponentials and once more for
the gradients; a block is rounded to the activations' dtype, as whole logits would be, and everything after
that is fp32. Blocks of the vocabulary, not of tokens: the gradient of a row of the weight is one product.

Method: the running maximum and sum of Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 2**29
"""Memory of one block of logits."""


class VocabStatistics(NamedTuple):
    """What the loss needs of a token's logits; each [T], fp32 but `best`."""

    maximum: Tensor
    sum_exp: Tensor
    """Of exp(logit - maximum)."""
    target: Tensor
    """Logit of the label; minus infinity where the label is not in this part of the vocabulary."""
    best: Tensor
    """First place of the maximum, int64."""


def vocab_statistics(hidden: Tensor, weight: Tensor, labels: Tensor) -> VocabStatistics:
    """Statistics of the logits `hidden @ weight.T`, not differentiable.

    Args:
        hidden: [T, H], any floating dtype.
        weight: [V, H], hidden's dtype.
        labels: [T], int64; outside 0 .. V-1 where the label is in another part of the vocabulary.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    maximum, target = (hidden.new_full((len(hidden),), -torch.inf, dtype=dtype) for _ in range(2))
    statistics = VocabStatistics(maximum, torch.zeros_like(maximum), target, torch.zeros_like(labels))
    for start, rows in _blocks(weight, len(hidden)):
        logits = hidden @ rows.t()
        (_launch_statistics if hidden.is_cuda else _add_statistics)(logits, labels, start, statistics)
    return statistics


def vocab_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, log_sum_exp: Tensor, upstream: Tensor, with_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of sum(upstream * (log_sum_exp - logit of the label)).

    Args:
        hidden: [T, H].
        weight: [V, H].
        labels: [T]; as in `vocab_statistics`.
        log_sum_exp: over the whole vocabulary, [T], fp32.
        upstream: [T], fp32.
        with_weight: whether the weight's gradient is wanted.

    Returns:
        this part's share of hidden's gradient, [T, H] in fp32; the weight's gradient, [V, H] in its dtype.
    """
    d_hidden = torch.zeros_like(hidden, dtype=log_sum_exp.dtype)
    d_weight = torch.empty_like(weight) if with_weight else None
    for start, rows in _blocks(weight, len(hidden)):
        logits = hidden @ rows.t()
        (_launch_gradients if hidden.is_cuda else _turn_to_gradients)(
            logits, labels, start, log_sum_exp, upstream
        )
        if d_weight is not None:
            torch.mm(logits.t(), hidden, out=d_weight[start : start + len(rows)])
        if hidden.is_cuda and hidden.dtype != d_hidden.dtype:
            torch.addmm(d_hidden, logits, rows, out_dtype=d_hidden.dtype, out=d_hidden)
        else:
            d_hidden += logits @ rows
    return d_hidden, d_weight


def _blocks(weight: Tensor, num_tokens: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of equal blocks of the weight, each a multiple of 128 rows but for the last."""
    most = max(BLOCK_BYTES // (max(num_tokens, 1) * weight.element_size()), 128)
    count = -(-len(weight) // most)
    size = -(-len(weight) // (count * 128)) * 128
    for start in range(0, len(weight), size):
        yield start, weight[start : start + size]


def _add_statistics(logits: Tensor, labels: Tensor, start: int, so_far: VocabStatistics) -> None:
    logits = logits.to(so_far.maximum.dtype)
    block_maximum, place = logits.max(-1)
    better = block_maximum > so_far.maximum
    so_far.best.copy_(torch.where(better, place + start, so_far.best))
    maximum = torch.maximum(block_maximum, so_far.maximum)
    so_far.sum_exp.mul_((so_far.maximum - maximum).exp()).add_((logits - maximum.unsqueeze(-1)).exp().sum(-1))
    so_far.maximum.copy_(maximum)
    at = labels - start
    here = (at >= 0) & (at < logits.shape[1])
    found = logits.gather(1, at.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    so_far.target.copy_(torch.where(here, found, so_far.target))


def _turn_to_gradients(
    logits: Tensor, labels: Tensor, start: int, log_sum_exp: Tensor, upstream: Tensor
) -> None:
    grads = (logits.to(log_sum_exp.dtype) - log_sum_exp.unsqueeze(-1)).exp()
    places = torch.arange(start, start + logits.shape[1], device=labels.device)
    grads -= (places == labels.unsqueeze(-1)).to(grads.dtype)
    logits.copy_(grads * upstream.unsqueeze(-1))


def _launch_statistics(logits: Tensor, labels: Tensor, start: int, so_far: VocabStatistics) -> None:
    num_tokens, width = logits.shape
    if num_tokens:
        block = min(triton.next_power_of_2(width), 4096)
        _statistics_kernel[(num_tokens,)](logits, labels, *so_far, start, width, block, num_warps=8)


def _launch_gradients(
    logits: Tensor, labels: Tensor, start: int, log_sum_exp: Tensor, upstream: Tensor
) -> None:
    num_tokens, width = logits.shape
    if num_tokens:
        block = min(triton.next_power_of_2(width), 4096)
        grid = (num_tokens, triton.cdiv(width, block))
        _gradients_kernel[grid](logits, labels, log_sum_exp, upstream, start, width, block, num_warps=8)


@triton.jit
def _statistics_kernel(logits, labels, maximum, sum_exp, target, best, start, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * width
    high, total, place = tl.load(maximum + token), tl.load(sum_exp + token), tl.load(best + token)
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        x = tl.load(row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        block_high, at = tl.max(x, axis=0, return_indices=True)
        place = tl.where(block_high > high, (start + first + at).to(tl.int64), place)
        new_high = tl.maximum(high, block_high)
        total = total * tl.exp(high - new_high) + tl.sum(tl.exp(x - new_high), axis=0)
        high = new_high
    tl.store(maximum + token, high)
    tl.store(sum_exp + token, total)
    tl.store(best + token, place)
    at_label = tl.load(labels + token) - start
    if (at_label >= 0) & (at_label < width):
        tl.store(target + token, tl.load(row + at_label).to(tl.float32))


@triton.jit
def _gradients_kernel(logits, labels, log_sum_exp, upstream, start, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    at = logits + token * width + columns
    p = tl.exp(tl.load(at, mask=inside, other=0.0).to(tl.float32) - tl.load(log_sum_exp + token))
    p -= tl.where(columns == tl.load(labels + token) - start, 1.0, 0.0)
    tl.store(at, (p * tl.load(upstream + token)).to(logits.dtype.element_ty), mask=inside)
