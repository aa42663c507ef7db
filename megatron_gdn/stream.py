"""What the layers of one rank need to know of a microbatch, made once and shared by all of them.

All integers come from the CPU; a layer only reads tensors that are already on its device, so the
number of device-to-host copies per step does not grow with the layers.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_gdn import cp_layout
from megatron_gdn.cp_layout import CPLayout
from megatron_gdn.rows import Rows


@dataclass(frozen=True, eq=False)
class StreamPlan:
    """Layout, spans and documents of one microbatch, seen from one CP rank.

    Legend: S tokens of the whole stream, s tokens of this rank, B streams (rows) side by side.
    """

    layout: CPLayout
    cp_size: int
    cp_rank: int
    seq_len: int
    """S, over all CP ranks."""
    batch: int
    """B. Packed streams have B = 1: several samples are laid end to end."""
    cu_seqlens: tuple[int, ...]
    """Document borders of the whole stream, from 0 to S; (0, S) when nothing is packed."""
    device: torch.device

    def __post_init__(self):
        cp_layout.check_cu_seqlens(self.cu_seqlens, self.seq_len)
        self.span_len  # noqa: B018  (refuses a stream that does not divide)

    @property
    def packed(self) -> bool:
        """Whether the stream holds more than one document."""
        return len(self.cu_seqlens) > 2

    @cached_property
    def span_len(self) -> int:
        """Tokens per span."""
        return cp_layout.span_length(self.layout, self.cp_size, self.seq_len)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, end) stream positions of this rank's spans, in local buffer order."""
        return cp_layout.local_ranges(self.layout, self.cp_size, self.cp_rank, self.seq_len)

    @cached_property
    def local_rows(self) -> Rows:
        """This rank's tokens as spans x batch rows of `span_len` tokens, span-major."""
        return Rows.from_ranges(self.cu_seqlens, self.ranges, self.batch, self.device)

    @cached_property
    def span_rows(self) -> tuple[Rows, ...]:
        """`local_rows` span by span."""
        return tuple(Rows.from_ranges(self.cu_seqlens, (r,), self.batch, self.device) for r in self.ranges)

    @cached_property
    def stream_rows(self) -> Rows:
        """The whole stream as B rows of S tokens."""
        return Rows.from_ranges(self.cu_seqlens, ((0, self.seq_len),), self.batch, self.device)

    @cached_property
    def local_positions(self) -> Tensor:
        """Position of each local token in its document, [s], int64: what RoPE turns by."""
        return self.local_rows.positions[:: self.batch].reshape(-1)

    @cached_property
    def stacked_to_stream(self) -> Tensor:
        """`cp_layout.stacked_to_stream` on the device, [spans of all ranks], int64."""
        return torch.tensor(cp_layout.stacked_to_stream(self.layout, self.cp_size), device=self.device)

    def to_rows(self, x: Tensor) -> Tensor:
        """This rank's tokens [s, B, ...] as `local_rows`, [R, span_len, ...]; a view when B is 1."""
        return x.unflatten(0, (-1, self.span_len)).transpose(1, 2).flatten(0, 1)

    def from_rows(self, x: Tensor) -> Tensor:
        """Inverse of `to_rows`."""
        return x.unflatten(0, (-1, self.batch)).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class TokensAhead:
    """What multi-token prediction of depth d reads: for each token, the one d places on in its document.

    Legend: s tokens of this rank, B streams. Where the document ends before that: zeros that do not count.
    """

    tokens: Tensor
    """[B, s], int64: the token d places on."""
    labels: Tensor
    """[B, s], int64: the label of that token, which is the target."""
    loss_mask: Tensor
    """[B, s], float32: 1 where the target counts."""
    num_targets: int
    """Targets that count in the whole microbatch, all CP ranks together."""
    num_labels: int
    """Labels of the main prediction that count in the whole microbatch."""


@dataclass
class StreamParams(PackedSeqParams):
    """The host's `PackedSeqParams` with the plan that every layer reads.

    `qkv_format` stays the host's: "thd" when documents are packed, else "sbhd".
    """

    plan: StreamPlan | None = field(default=None, repr=False)
    ahead: tuple[TokensAhead, ...] = field(default=(), repr=False)
    """Depths 1, 2, ... of multi-token prediction."""


@lru_cache(maxsize=8)
def dense_plan(
    layout: CPLayout, cp_size: int, cp_rank: int, seq_len: int, batch: int, device: torch.device
) -> StreamPlan:
    """The plan of a microbatch without packed documents."""
    return StreamPlan(layout, cp_size, cp_rank, seq_len, batch, (0, seq_len), device)


def cp_group_of(packed_seq_params: PackedSeqParams | None, default: ProcessGroup) -> ProcessGroup:
    """The ranks that share this microbatch's stream: `packed_seq_params.cp_group`, else `default`.

    So a live model can run on another number of CP ranks, as for evaluation, call by call.

    Raises:
        ValueError: `local_cp_size` says another size than the group has.
    """
    group = getattr(packed_seq_params, "cp_group", None) or default
    size = getattr(packed_seq_params, "local_cp_size", None)
    if size is not None and size != group.size():
        raise ValueError(
            f"packed_seq_params.local_cp_size {int(size)} is not the size of the context-parallel group, "
            f"{group.size()}; pass the group of these ranks as packed_seq_params.cp_group too."
        )
    return group


def plan_of(
    packed_seq_params: PackedSeqParams | None,
    *,
    layout: CPLayout,
    cp_group: ProcessGroup,
    seq_len_local: int,
    batch: int,
    device: torch.device,
) -> StreamPlan:
    """The plan that came with the microbatch, or the one its host parameters imply.

    A host `PackedSeqParams` (format "thd") is read once and keeps its plan, so the copy of
    `cu_seqlens` to the host happens once per microbatch, not once per layer. It is read again when it
    holds another tensor, or for a group of another size; writing into the tensor that was read is not seen.

    Args:
        packed_seq_params: `StreamParams`, the host's class, or None for a dense microbatch.
        layout: the layout that the asking layer takes.
        cp_group: the ranks that share the stream.
        seq_len_local: tokens of this rank (after gathering sequence-parallel shards).
        batch: streams side by side, B.
        device: where the layer runs.

    Raises:
        ValueError: the plan's layout, group size, length or batch is not what the layer was given.
    """
    cp_size, cp_rank = cp_group.size(), cp_group.rank()
    seq_len = seq_len_local * cp_size
    plan = getattr(packed_seq_params, "plan", None)
    if plan is None:
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            plan = dense_plan(layout, cp_size, cp_rank, seq_len, batch, device)
        else:
            borders = packed_seq_params.cu_seqlens_q_padded
            borders = packed_seq_params.cu_seqlens_q if borders is None else borders
            read, plan = getattr(packed_seq_params, "_plan_of_borders", (None, None))
            if read is not borders or (plan.cp_size, plan.cp_rank) != (cp_size, cp_rank):
                cu_seqlens = tuple(borders.tolist())
                plan = StreamPlan(layout, cp_size, cp_rank, seq_len, batch, cu_seqlens, device)
                packed_seq_params._plan_of_borders = (borders, plan)
    got = (plan.layout, plan.cp_size, plan.cp_rank, plan.seq_len, plan.batch)
    if got != (layout, cp_size, cp_rank, seq_len, batch):
        raise ValueError(
            f"the layer takes (layout, cp size, cp rank, stream length, batch) "
            f"{(layout, cp_size, cp_rank, seq_len, batch)} but the microbatch was cut for {got}; "
            "--cp-layout must be the same for the data and for every layer, and the CP group is the model's "
            "or, for both, that of packed_seq_params.cp_group."
        )
    return plan
