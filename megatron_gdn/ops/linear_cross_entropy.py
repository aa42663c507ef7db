"""Cross entropy of an output layer over a part of the vocabulary, never with all logits in memory.

Logits are made block by block: for all tokens and some of the vocabulary, or for some tokens and all of the
vocabulary. A block is rounded to the activations' dtype, as whole logits would be, and everything after that
is fp32.

Method: the running maximum and sum of Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 2**30
"""Memory of one block of logits."""
BLOCK_STEP = 128
"""Tokens or vocabulary of a block are a multiple of this, which suits matrix products."""


class VocabStatistics(NamedTuple):
    """What the loss needs of a token's logits; each [T], fp32 but `best`."""

    maximum: Tensor
    sum_exp: Tensor
    """Of exp(logit - maximum)."""
    target: Tensor
    """Logit of the label; minus infinity where the label is not in this part of the vocabulary."""
    best: Tensor | None
    """First place of the maximum, int64, where it is wanted."""

    @classmethod
    def of_nothing(cls, labels: Tensor, dtype: torch.dtype, with_best: bool) -> "VocabStatistics":
        """Of no logits yet."""
        low = torch.full(labels.shape, -torch.inf, dtype=dtype, device=labels.device)
        return cls(low, torch.zeros_like(low), low.clone(), torch.zeros_like(labels) if with_best else None)


def blocks(length: int, bytes_each: int) -> Iterator[slice]:
    """Equal slices of `length` tokens or rows, of which each has `bytes_each` in logits."""
    most = max(BLOCK_BYTES // max(bytes_each, 1), BLOCK_STEP)
    count = max(-(-length // most), 1)
    size = max(-(-length // (count * BLOCK_STEP)), 1) * BLOCK_STEP
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def vocab_statistics(hidden: Tensor, weight: Tensor, labels: Tensor, with_best: bool) -> VocabStatistics:
    """Statistics of the logits `hidden @ weight.T`, a block of the vocabulary after another.

    Args:
        hidden: [T, H], any floating dtype.
        weight: [V, H], hidden's dtype.
        labels: [T], int64; outside 0 .. V-1 where the label is in another part of the vocabulary.
        with_best: whether the place of the maximum is wanted.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    statistics = VocabStatistics.of_nothing(labels, dtype, with_best)
    for rows in blocks(len(weight), len(hidden) * hidden.element_size()):
        add_statistics(hidden @ weight[rows].t(), labels, rows.start, statistics)
    return statistics


def vocab_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, log_sum_exp: Tensor, upstream: Tensor, with_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of sum(upstream * (log_sum_exp - logit of label)), a block of the vocabulary after another.

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
    for rows in blocks(len(weight), len(hidden) * hidden.element_size()):
        logits = hidden @ weight[rows].t()
        turn_to_gradients(logits, labels, rows.start, log_sum_exp, upstream)
        if d_weight is not None:
            torch.mm(logits.t(), hidden, out=d_weight[rows])
        add_product(d_hidden, logits, weight[rows])
    return d_hidden, d_weight


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in total's dtype (fp32) whatever that of `a` and `b`."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def add_statistics(logits: Tensor, labels: Tensor, start: int, so_far: VocabStatistics) -> None:
    """Update `so_far` by the logits [T, C] of the vocabulary from `start` on."""
    if not logits.is_cuda:
        _add_statistics(logits, labels, start, so_far)
    elif logits.numel():
        num_tokens, width = logits.shape
        block = min(triton.next_power_of_2(width), 4096)
        with_best = so_far.best is not None
        _statistics_kernel[(num_tokens,)](
            logits, labels, *so_far, start, width, block, with_best, num_warps=8
        )


def turn_to_gradients(
    logits: Tensor, labels: Tensor, start: int, log_sum_exp: Tensor, upstream: Tensor
) -> None:
    """Put the gradients of the logits [T, C] of the vocabulary from `start` on in their place."""
    if not logits.is_cuda:
        _turn_to_gradients(logits, labels, start, log_sum_exp, upstream)
    elif logits.numel():
        num_tokens, width = logits.shape
        block = min(triton.next_power_of_2(width), 4096)
        grid = (num_tokens, triton.cdiv(width, block))
        _gradients_kernel[grid](logits, labels, log_sum_exp, upstream, start, width, block, num_warps=8)


def _add_statistics(logits: Tensor, labels: Tensor, start: int, so_far: VocabStatistics) -> None:
    logits = logits.to(so_far.maximum.dtype)
    block_maximum, place = logits.max(-1)
    if so_far.best is not None:
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


@triton.jit
def _statistics_kernel(
    logits,
    labels,
    maximum,
    sum_exp,
    target,
    best,
    start,
    width,
    block: tl.constexpr,
    with_best: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * width
    high, total = tl.load(maximum + token), tl.load(sum_exp + token)
    if with_best:
        place = tl.load(best + token)
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        x = tl.load(row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        if with_best:
            block_high, at = tl.max(x, axis=0, return_indices=True)
            place = tl.where(block_high > high, (start + first + at).to(tl.int64), place)
        else:
            block_high = tl.max(x, axis=0)
        new_high = tl.maximum(high, block_high)
        total = total * tl.exp(high - new_high) + tl.sum(tl.exp(x - new_high), axis=0)
        high = new_high
    tl.store(maximum + token, high)
    tl.store(sum_exp + token, total)
    if with_best:
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
