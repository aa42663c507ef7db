"""How a GatedDeltaNet layer uses its context-parallel group: plain objects without parameters.

A strategy turns this rank's tokens into rows that a recurrent kernel can run on, and back. It is no
part of the model: every strategy computes the same function with the same state dict.

Legend: s tokens of this rank, S of the stream, B batch, R rows, C channels of the convolution (queries,
keys, values), H value heads and h key heads of this tensor-parallel rank, K and V their sizes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_gdn import cp_comm
from megatron_gdn.rows import Rows, StateExchange
from megatron_gdn.stream import StreamPlan
from megatron_gdn.validation import check_headwise_heads


@dataclass(frozen=True)
class Sections:
    """The parts of a tensor laid out as queries, keys, values, b, a along one axis."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Channels of query, key, value, b and a."""
        qk, v = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return qk, qk, v, self.value_heads, self.value_heads

    @property
    def heads(self) -> tuple[int, int, int, int, int]:
        """Heads of query, key, value, b and a."""
        return self.key_heads, self.key_heads, self.value_heads, self.value_heads, self.value_heads


class WholeStream:
    """No context parallelism: B rows of the whole stream, all heads. The strategies below differ from it."""

    def __init__(self, sections: Sections):
        self._sections = sections

    def sections(self) -> Sections:
        """Heads that this rank runs."""
        return self._sections

    def rows(self, plan: StreamPlan) -> Rows:
        """Document borders of the rows that `enter` makes."""
        return plan.stream_rows

    def enter(self, qkv_sBC: Tensor, ba_sBC: Tensor, plan: StreamPlan) -> tuple[Tensor, Tensor]:
        """Projected channels [s, B, ...] to rows: (queries-keys-values, b-a), [R, row_len, ...]."""
        return qkv_sBC.transpose(0, 1), ba_sBC.transpose(0, 1)

    def gate(self, z_sBC: Tensor) -> Tensor:
        """The output gate as it is kept for backward, [s, B, C]; a view of all that was projected."""
        return z_sBC

    def leave(self, out: Tensor, plan: StreamPlan) -> Tensor:
        """Rows [R, row_len, C] of the rule's output to [s, B, all channels of this TP rank]."""
        return out.transpose(0, 1)

    def halo(self, x: Tensor, taps: int, plan: StreamPlan) -> Tensor | None:
        """The `taps` tokens before each row of `x` [R, row_len, C]; None if every row starts a document."""

    def exchange(self, plan: StreamPlan) -> StateExchange | None:
        """How rows pass their recurrent state on; None when every row starts a document."""

    def conv_weight(self, weight: Tensor) -> Tensor:
        """[all channels, W] to the channels that this rank runs."""
        return weight

    def per_head(self, parameter: Tensor) -> Tensor:
        """[H] to the value heads that this rank runs."""
        return parameter


class HeadwiseCP(WholeStream):
    """All-to-all: every rank runs the whole stream for its share of the heads.

    Where there are fewer key heads than ranks, several ranks get a copy of the same key head; each
    contributes the gradient of its own value heads, and the copies' gradients add up.

    Communication per layer and forward: one all-to-all in of s*B*(queries, keys, values, b, a), one out
    of s*B*values; the output gate z stays where it is. Backward: the same two, reversed.
    Source: Jacobs et al., "DeepSpeed Ulysses" (2023), applied to the heads of a recurrence.
    """

    def __init__(self, sections: Sections, cp_group: ProcessGroup):
        self._group, self._size, self._rank = cp_group, cp_group.size(), cp_group.rank()
        self._all = sections
        share = {n: max(n // self._size, 1) for n in sections.heads}
        self._sections = Sections(
            share[sections.key_heads], share[sections.value_heads], sections.key_dim, sections.value_dim
        )

    def _mine(self, x: Tensor, heads: int) -> Tensor:
        """Rows of a parameter [heads * D, ...] that belong to this rank's share of the heads."""
        share = max(heads // self._size, 1)
        start = self._rank * heads // self._size
        return x.unflatten(0, (heads, -1))[start : start + share].flatten(0, 1)

    def enter(self, qkv_sBC: Tensor, ba_sBC: Tensor, plan: StreamPlan) -> tuple[Tensor, Tensor]:
        """[s, B, ...] of all heads to [B, S, ...] of this rank's heads."""
        blocks = tuple(
            (size, min(heads, self._size))
            for size, heads in zip(self._all.sizes, self._all.heads, strict=True)
        )
        mine = cp_comm.cp2hp((qkv_sBC, ba_sBC), (blocks[:3], blocks[3:]), plan, self._group)
        return tuple(x.transpose(0, 1) for x in mine)

    def gate(self, z_sBC: Tensor) -> Tensor:
        """A copy: a view would keep the projected queries, keys and values too, which nobody needs here."""
        return z_sBC.contiguous()

    def leave(self, out: Tensor, plan: StreamPlan) -> Tensor:
        """[B, S, values of this rank's heads] to [s, B, values of all heads]."""
        return cp_comm.hp2cp(out.transpose(0, 1), plan, self._group)

    def conv_weight(self, weight: Tensor) -> Tensor:
        """[C, W] to the channels of this rank's heads."""
        parts = weight.split(self._all.sizes[:3], dim=0)
        return torch.cat([self._mine(x, n) for x, n in zip(parts, self._all.heads[:3], strict=True)])

    def per_head(self, parameter: Tensor) -> Tensor:
        """[H] to this rank's value heads."""
        return self._mine(parameter, self._all.value_heads)


class ChunkwiseCP(WholeStream):
    """State passing: tokens stay, every rank runs all heads on its own spans.

    Communication per layer and forward: one all-to-all of the W-1 tokens before each span, one
    all-gather of the spans' summaries, H*K*(K+V) fp32 values each. Backward: the same amounts. Neither
    depends on the number of tokens.
    Source: `cp_comm.StatesBetweenRanks`, `cp_comm.exchange_halo`.
    """

    def __init__(self, sections: Sections, cp_group: ProcessGroup):
        super().__init__(sections)
        self._group = cp_group

    def rows(self, plan: StreamPlan) -> Rows:
        """One row per span and batch entry."""
        return plan.local_rows

    def enter(self, qkv_sBC: Tensor, ba_sBC: Tensor, plan: StreamPlan) -> tuple[Tensor, Tensor]:
        """[s, B, C] to [spans * B, span_len, C]."""
        return plan.to_rows(qkv_sBC), plan.to_rows(ba_sBC)

    def leave(self, out: Tensor, plan: StreamPlan) -> Tensor:
        """[spans * B, span_len, C] to [s, B, C]."""
        return plan.from_rows(out)

    def halo(self, x: Tensor, taps: int, plan: StreamPlan) -> Tensor:
        """[R, taps, C], from the ranks that hold them."""
        before = x.new_zeros(x.shape[0], taps, x.shape[2])
        # Once, unless a span is shorter than the taps reach: then what came before it travels on.
        for _ in range(-(-taps // plan.span_len)):
            tails = torch.cat([before, x[:, -taps:]], dim=1)[:, -taps:]
            before = cp_comm.exchange_halo(tails, plan, self._group)
        return before

    def exchange(self, plan: StreamPlan) -> StateExchange:
        """Gather every span's summary and scan them in stream order, or back."""
        return cp_comm.StatesBetweenRanks(plan, self._group)


GDN_CP_MODES = {"headwise": HeadwiseCP, "chunkwise": ChunkwiseCP}


def build_context_parallel(mode: str, sections: Sections, cp_group: ProcessGroup) -> WholeStream:
    """The strategy called `mode`, or none of them on a group of one.

    Raises:
        ValueError: unknown mode, or heads that headwise cannot share out.
    """
    if mode not in GDN_CP_MODES:
        raise ValueError(f"GDN CP mode {mode!r} is unknown; choose one of {', '.join(GDN_CP_MODES)}.")
    if cp_group.size() == 1:
        return WholeStream(sections)
    if mode == "headwise":
        check_headwise_heads(sections.key_heads, sections.value_heads, cp_group.size())
    return GDN_CP_MODES[mode](sections, cp_group)
