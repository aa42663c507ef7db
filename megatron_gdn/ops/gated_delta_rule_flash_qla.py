"""The gated delta rule on FlashQLA's TileLang kernels, called directly.

All rows lie end to end as one packed stream of pieces (documents, cut where rows begin). FlashQLA cuts
long pieces into *parts* that run side by side on the card, each started from a state that a first, light
pass finds. Context parallelism needs nothing more: the same pass gives the summaries of whole rows, the
exchange gives the states that enter them, and from these and the parts' own summaries follows the state
that enters every part. The backward does the same from the other end. No hidden state moves, and rows
may lie anywhere in the stream, so that zigzag is no different from contiguous.

Where a head forgets by more than exp(-10) within a part, FlashQLA takes its M as zero and starts from
the last chunks that count; that is below the rounding of its bf16 operands, and done here too.

Source: FlashQLA 0.1.3 (MIT), flash_qla/ops/gated_delta_rule/chunk, `cp_preprocess_fwd` and
`cp_preprocess_bwd`, for what each building block computes.

Legend: T = R * s tokens of all rows, P parts; else as in `gated_delta_rule`.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_gdn.rows import Rows, StateExchange

TESTED_VERSION = (0, 1, 3)
"""Its building blocks are no public interface: another version is another kernel to test."""
CHUNK = 64


def run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, exchange: StateExchange | None
) -> Tensor:
    """All pieces of all rows in one call; args and result as for `gated_delta_rule_torch.run`.

    Communication: that of `exchange`, once in forward and once, in reverse, in backward; the latter while
    the parts' states are made anew.
    """
    from flash_qla import chunk_gated_delta_rule

    q, k, v, g, beta = (x.flatten(0, 1).unsqueeze(0).contiguous() for x in (q, k, v, g, beta))
    partition = _partition(rows, v.shape[2])
    if exchange is None:
        context = partition.context
        out, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cp_context=context)
    else:
        out = _PassingState.apply(q, k, v, g, beta, partition, exchange)
    return out.view(rows.num_rows, rows.row_len, *v.shape[2:])


@dataclass(frozen=True, eq=False)
class _Partition:
    """How FlashQLA cuts the pieces of some rows into parts; shared by all layers of a microbatch."""

    rows: Rows
    context: Any
    """FlashQLA's own description, on the device: pieces, parts, and which parts belong to which piece."""
    part_lengths: tuple[int, ...]
    parts_of_piece: tuple[int, ...]
    """Border between pieces, counted in parts, [pieces + 1]."""

    @property
    def split(self) -> bool:
        """Whether any piece has more than one part."""
        return self.context.is_intra

    @property
    def pieces(self) -> Tensor:
        """Borders of the pieces, [pieces + 1], int32."""
        return self.context.cu_seqlens

    @property
    def parts(self) -> Tensor:
        """Borders of the parts, [P + 1], int32."""
        return self.context.intra_cp_cu_seqlens if self.split else self.context.cu_seqlens

    @cached_property
    def _outer_parts(self) -> tuple[list[int], list[int]]:
        """The first and the last part of every row."""
        ends = list(accumulate(len(borders) - 1 for borders in self.rows.borders))
        firsts = [self.parts_of_piece[piece] for piece in (0, *ends[:-1])]
        return firsts, [self.parts_of_piece[end] - 1 for end in ends]

    def _flags(self, places) -> Tensor:
        """[P], bool: true at `places`."""
        flags = torch.zeros(len(self.part_lengths), dtype=torch.bool)
        flags[list(places)] = True
        return flags.to(self.rows.device)

    @cached_property
    def final_unused(self) -> Tensor:
        """Parts whose final state nobody asks for: last of a piece that ends inside the row, [P], bool."""
        ends = {part - 1 for part in self.parts_of_piece[1:]}
        return self._flags(ends - set(self._outer_parts[1]))

    @cached_property
    def initial_unused(self) -> Tensor:
        """Parts whose initial state's gradient nobody asks for: a document begins there, [P], bool."""
        return self._flags(set(self.parts_of_piece[:-1]) - set(self._outer_parts[0]))

    @cached_property
    def ragged(self) -> Tensor | None:
        """Row ends that are no whole chunk, [P, 1], bool; None if there are none.

        FlashQLA counts the last chunks that matter from the part's end, which is right only for whole
        chunks. Such a part is run from its start.
        """
        ends = [part for part in self._outer_parts[1] if self.part_lengths[part] % CHUNK]
        return self._flags(ends).unsqueeze(1) if ends else None

    @cached_property
    def num_chunks(self) -> Tensor:
        """Chunks of every part, [P, 1], int32."""
        counts = [-(-length // CHUNK) for length in self.part_lengths]
        return torch.tensor(counts, dtype=torch.int32, device=self.rows.device).unsqueeze(1)

    def placed(self, states: Tensor, pieces: Tensor) -> Tensor:
        """[R, H, K, V] at `pieces` of [all pieces, H, K, V], zeros elsewhere."""
        out = states.new_zeros(self.pieces.numel() - 1, *states.shape[1:])
        return out.index_copy_(0, pieces, states)


def _partition(rows: Rows, num_heads: int) -> _Partition:
    """The partition of `rows`, made from the lengths on the CPU on first use and kept with them."""
    from flash_qla.ops.gated_delta_rule.chunk.cp import build_cp_context
    from flash_qla.utils.index import prepare_varlen_metadata

    cache = rows.__dict__.setdefault("_flash_qla", {})
    if num_heads not in cache:
        on_cpu = build_cp_context(
            rows.cu_seqlens_cpu, enable_intra=True, num_v_heads=num_heads, chunk_size=CHUNK, is_train=True
        )
        tensors = {f.name: getattr(on_cpu, f.name) for f in fields(on_cpu)}
        moved = {n: x.to(rows.device) for n, x in tensors.items() if isinstance(x, Tensor)}
        context = replace(on_cpu, **moved)
        prepare_varlen_metadata(context.cu_seqlens, on_cpu.cu_seqlens)
        parts, borders = on_cpu.cu_seqlens, range(on_cpu.cu_seqlens.numel())
        if on_cpu.is_intra:
            parts, borders = on_cpu.intra_cp_cu_seqlens, on_cpu.seq_map_r2c.tolist()
            prepare_varlen_metadata(context.intra_cp_cu_seqlens, parts)
        cache[num_heads] = _Partition(rows, context, tuple(parts.diff().tolist()), tuple(borders))
    return cache[num_heads]


class _PassingState(torch.autograd.Function):
    """The rule on rows that pass their state on.

    q, k, v: [1, T, heads, 128] bf16 or fp16; g, beta: [1, T, H] fp32.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, partition: _Partition, exchange: StateExchange):
        from flash_qla.ops.gated_delta_rule.chunk import (
            aggregate_card_state,
            correct_initial_states,
            fused_gdr_fwd,
            get_warmup_chunks_bidi,
            kkt_solve,
        )
        from flash_qla.ops.utils import chunk_local_cumsum

        rows, context = partition.rows, partition.context
        g = chunk_local_cumsum(g, cu_seqlens=partition.pieces, chunk_size=CHUNK)
        A = kkt_solve(k=k, b=beta, cu_seqlens=partition.pieces, chunk_size=CHUNK)

        # How many chunks of each part matter to its final state, and to its initial state's gradient;
        # `through`: whether the state passes through the part at all.
        chunks, chunks_back, through, through_back = get_warmup_chunks_bidi(
            g=g,
            cu_seqlens=partition.parts,
            ht_mask_fwd=partition.final_unused,
            ht_mask_bwd=partition.initial_unused,
            chunk_size=CHUNK,
        )
        if partition.ragged is not None:
            chunks = torch.where(partition.ragged, partition.num_chunks, chunks)
            through = through | partition.ragged

        part_s, part_m = _part_summaries(k, v, A, g, beta, partition.parts, chunks)
        s, m = part_s, part_m
        if partition.split:
            s, m = aggregate_card_state(part_s, part_m, through, context.seq_map_r2c)
        m = m[rows.last_pieces] * rows.inside.view(-1, 1, 1, 1)
        entering = exchange(torch.cat([m, s[rows.last_pieces]], dim=-1))
        entering = entering * rows.continued.view(-1, 1, 1, 1)

        initial = partition.placed(entering, rows.first_pieces)
        if partition.split:
            initial = correct_initial_states(initial, part_s, part_m, through, context.seq_map_r2c)
        out, _, _ = fused_gdr_fwd(
            q=q,
            k=k,
            v=v,
            a=A,
            g=g,
            b=beta,
            initial_state=initial,
            output_final_state=False,
            output_h=False,
            output_o=True,
            cu_seqlens=partition.parts,
            cp_seq_map=context.seq_map_c2r,
            raw_cu_seqlens=partition.pieces,
        )
        # Without a split there may be many pieces; then only what enters the rows is kept.
        kept = (initial, part_m, chunks_back, through_back) if partition.split else (entering, chunks_back)
        ctx.save_for_backward(q, k, v, g, beta, A, m, *kept)
        ctx.partition, ctx.exchange = partition, exchange
        return out

    @staticmethod
    def backward(ctx, d_out):
        from flash_qla.ops.gated_delta_rule.chunk import (
            aggregate_card_state,
            correct_terminal_states,
            fused_gdr_bwd,
            fused_gdr_dh,
            fused_gdr_h,
        )
        from flash_qla.ops.utils import chunk_local_cumsum, group_reduce_vector

        partition, exchange = ctx.partition, ctx.exchange
        rows, context, d_out = partition.rows, partition.context, d_out.contiguous()
        q, k, v, g, beta, A, m, *kept = ctx.saved_tensors
        if partition.split:
            initial, part_m, chunks_back, through_back = kept
        else:
            entering, chunks_back = kept
            initial = partition.placed(entering, rows.first_pieces)

        _, part_d = fused_gdr_dh(
            q=q,
            k=k,
            a=A,
            g=g,
            b=beta,
            do=d_out,
            output_dh0=True,
            output_dh=False,
            cu_seqlens=partition.parts,
            num_warmup_chunks=chunks_back,
        )
        d = part_d
        if partition.split:
            reverse = {"reverse": True, "transpose_m": True, "compute_m": False}
            d, _ = aggregate_card_state(part_d, part_m, through_back, context.seq_map_r2c, **reverse)
        d = d[rows.first_pieces] * rows.continued.view(-1, 1, 1, 1)
        leaving = exchange.start_reverse(torch.cat([m.transpose(-1, -2), d], dim=-1))
        # Needs nothing of other ranks.
        states, _, _ = fused_gdr_h(
            k=k,
            v=v,
            a=A,
            g=g,
            b=beta,
            initial_state=initial,
            output_final_state=False,
            output_h=True,
            cu_seqlens=partition.parts,
        )

        d_final = partition.placed(leaving(), rows.last_pieces)
        if partition.split:
            d_final = correct_terminal_states(d_final, part_d, part_m, through_back, context.seq_map_r2c)
        dq, dk, dv, dg, dbeta, _ = fused_gdr_bwd(
            q=q, k=k, v=v, a=A, g=g, b=beta, do=d_out, dht=d_final, h=states, cu_seqlens=partition.parts
        )
        if k.shape[2] < v.shape[2]:
            dq, dk = (group_reduce_vector(x, k.shape[2]) for x in (dq, dk))
        dg = chunk_local_cumsum(
            dg, chunk_size=CHUNK, reverse=True, cu_seqlens=partition.pieces, zero_last_chunk=True
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv, dg, dbeta, None, None


def _part_summaries(k, v, A, g, beta, parts, chunks) -> tuple[Tensor, Tensor]:
    """S [P, H, K, V] and M [P, H, K, K] of every part in fp32, from its last `chunks` chunks.

    `fused_gdr_h` stores both in bf16. Its kernel has them in fp32 and stores any dtype, so it is called
    here without that wrapper: over many spans, rounding M at every one would add up.
    """
    from flash_qla.ops.gated_delta_rule.chunk.hopper.prepare_h import tilelang_prepare_h
    from flash_qla.utils.index import prepare_chunk_offsets

    (key_heads, key_dim), (heads, value_dim) = k.shape[2:], v.shape[2:]
    num_parts = parts.numel() - 1
    s = torch.empty(num_parts, heads, key_dim, value_dim, dtype=torch.float32, device=k.device)
    m = torch.empty(num_parts, heads, key_dim, key_dim, dtype=torch.float32, device=k.device)
    kernel = tilelang_prepare_h(
        heads,
        key_heads,
        key_dim,
        value_dim,
        CHUNK,
        accum_dtype="float32",
        qkva_dtype=k.dtype,
        g_dtype=g.dtype,
        b_dtype=beta.dtype,
        h0_dtype=torch.float32,
        ht_dtype=torch.float32,
        h_dtype=k.dtype,
        seqlen_dtype=parts.dtype,
        use_initial_state=False,
        store_final_state=True,
        store_h=False,
        is_varlen=True,
        is_cp=True,
        state_v_first=False,
    )
    offsets, _ = prepare_chunk_offsets(parts, CHUNK)
    no_states = k.new_empty(1, 0, heads, key_dim, value_dim)
    # `s` stands in for the initial state that is not used.
    kernel(k, v, A, g, beta, s, parts, offsets.to(parts.dtype), chunks, no_states, s, m)
    return s, m
