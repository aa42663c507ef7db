"""The one table of streams, heads and tolerances that all tests draw from.

Streams are chosen for context-parallel sizes 1, 2 and 4 in both layouts. At 128 tokens the span
borders are the multiples of 16 (cp 4 zigzag), 32 (cp 2 zigzag, cp 4 contiguous) and 64 (cp 2
contiguous), so what is placed at every multiple of 16 is at a border of every cut.
"""

from itertools import accumulate
from typing import NamedTuple

import torch

from tests.helpers.reference import GDNSizes, dense_positions, packed_positions

CONV_WIDTH = 4


class Packing(NamedTuple):
    """One microbatch: `batch` streams of `seq_len` tokens; packed ones have borders and batch 1."""

    seq_len: int
    cu_seqlens: tuple[int, ...] | None = None
    batch: int = 1

    @property
    def borders(self) -> tuple[int, ...]:
        """Document borders of each stream, also of an unpacked one."""
        return self.cu_seqlens or (0, self.seq_len)

    @property
    def positions(self) -> torch.Tensor:
        """Place of every token in its document, [batch, seq_len], made without the package."""
        if self.cu_seqlens is None:
            return dense_positions(self.batch, self.seq_len)
        return packed_positions(self.cu_seqlens)


def _short_documents(before: int, after: int) -> tuple[int, ...]:
    """Borders of documents from `before` x k tokens before each span border to `after` x k after it.

    k runs through 1 .. CONV_WIDTH - 1 from border to border (3, 2 and 1 at 32, 64 and 96).
    """
    borders = {0, 128}
    for i in range(1, 8):
        k = 1 + i % (CONV_WIDTH - 1)
        borders |= {16 * i - before * k, 16 * i + after * k}
    return tuple(sorted(borders))


_MANY_SHORT = (5, 3, 1, 2, 7, 1, 1, 4, 9, 2, 6, 1, 3, 8, 5, 2, 2, 1, 11, 4, 1, 6, 3, 10, 1, 2, 5, 7, 4, 11)

PACKINGS: dict[str, Packing] = {
    "one_document": Packing(128),
    "borders_on_spans": Packing(128, (0, 16, 32, 64, 128)),
    "borders_off_spans": Packing(128, (0, 23, 75, 101, 128)),
    "many_short": Packing(128, (0, *accumulate(_MANY_SHORT))),
    # whole documents of 1..3 tokens that end at, begin at, or lie across a span border
    "short_before_border": Packing(128, _short_documents(1, 0)),
    "short_after_border": Packing(128, _short_documents(0, 1)),
    "short_across_border": Packing(128, _short_documents(1, 1)),
    # documents that begin 1..3 tokens before a span border and go on: fewer taps than the halo holds
    "begin_before_border": Packing(128, (0, *(16 * i - 1 - i % 3 for i in range(1, 8)), 128)),
    "empty_documents": Packing(128, (0, 0, 16, 16, 16, 40, 64, 64, 128, 128)),
    "not_64": Packing(104),
    "not_64_packed": Packing(104, (0, 37, 38, 91, 104)),
    # spans of 2 tokens at cp 4 zigzag: the convolution reaches over more than one span
    "spans_below_conv": Packing(16),
    "spans_below_conv_packed": Packing(16, (0, 1, 6, 16)),
    # spans of 80 tokens at cp 4 zigzag: one whole chunk of 64 and a part of one
    "several_chunks": Packing(640, (0, 130, 131, 500, 640)),
    "batch_of_2": Packing(64, None, 2),
}

GVA_HEADS: dict[str, GDNSizes] = {
    # key and value sizes differ, so that a swapped pair of dimensions cannot pass
    "gva1": GDNSizes(4, 4, 16, 32),
    "gva2": GDNSizes(4, 8, 16, 32),
    # 2 key heads: headwise on 4 ranks has to replicate them
    "gva4": GDNSizes(2, 8, 16, 32),
}

HEADS = GVA_HEADS | {"kernels": GDNSizes(4, 8, 128, 128)}
"""With the head dim of the released sizes, for GPU kernels; shared out over at most 8 ranks."""

# Tolerances: relative root mean square of the difference, sqrt(sum (got-want)^2 / sum want^2).
EXACT = 0.0
"""Moved data (layouts, collectives, shards) is not computed with: bit for bit."""
FP64_TRUTH = 1e-12
"""float64 against float64 in another order of sums: rounding 1e-16, times some hundred terms."""
FP32_TRUTH = 1e-5
"""float32 path against the float64 reference: rounding of 6e-8 through the recurrence, the sums over
tokens and the output norm. Our chunked rule measures at most 7e-7, gates included."""
FP32_SHARDED = 1e-5
"""float32 sharded against float32 whole: the same rounding, taken in another order."""
BF16_FACTOR = 2.0
"""bfloat16 sharded: at most this times the error that the unsharded bfloat16 path has against the
float64 reference. Sharding may reorder roundings, it may not add any."""
