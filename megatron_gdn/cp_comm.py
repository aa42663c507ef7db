"""Collectives of context parallelism with their gradients, on a group that the caller gives.

Only `all_to_all_single`, `all_gather_into_tensor` and `reduce_scatter_tensor` are used, so that
every path runs on gloo (CPU and CUDA tensors) and on NCCL.

Legend: S tokens of the stream, s of this rank, B batch, C channels, c this rank's share of them,
R rows of the local buffer (spans x batch, span-major). Capital: all ranks; lower case: this rank.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gdn import cp_layout
from megatron_gdn.stream import StreamPlan


class Arrival:
    """A result that is on its way while other work goes on."""

    def __init__(self, out: Tensor, source: Tensor, work: dist.Work):
        """Hold what the collective reads and writes until it is done.

        Args:
            out: where the result will be.
            source: what is sent.
            work: the collective.
        """
        self._out, self._source, self._work = out, source, work

    def wait(self) -> Tensor:
        """The result, for use on the current stream from here on."""
        self._work.wait()
        self._source = None
        return self._out


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single` along dim 0; its gradient is the same exchange the other way round."""

    @staticmethod
    def forward(ctx, x, group, send_splits, recv_splits):
        ctx.group, ctx.splits = group, (send_splits, recv_splits)
        return start_all_to_all(x, group, send_splits, recv_splits).wait()

    @staticmethod
    def backward(ctx, grad):
        send_splits, recv_splits = ctx.splits
        return _AllToAll.apply(grad, ctx.group, recv_splits, send_splits), None, None, None


class _AllGather(torch.autograd.Function):
    """Concatenate every rank's tensor along dim 0; its gradient is summed back to each rank."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return start_all_gather(x, group).wait()

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


def all_to_all(x: Tensor, group: dist.ProcessGroup, send_splits: list[int], recv_splits: list[int]) -> Tensor:
    """Send `send_splits[j]` leading entries of `x` to rank j, in order; receive likewise.

    Args:
        x: [sum(send_splits), ...], any floating dtype.
        group: the ranks that exchange.
        send_splits: entries of dim 0 for each rank of the group.
        recv_splits: entries of dim 0 from each rank of the group.

    Returns:
        [sum(recv_splits), ...] in order of the source rank.

    Communication: one all-to-all; the same in backward.
    """
    return _AllToAll.apply(x, group, send_splits, recv_splits)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `x` stacked along dim 0 in rank order.

    Communication: one all-gather; one reduce-scatter of the same size in backward.
    """
    return _AllGather.apply(x, group)


def start_all_to_all(
    x: Tensor, group: dist.ProcessGroup, send_splits: list[int], recv_splits: list[int]
) -> Arrival:
    """Begin what `all_to_all` does.

    Communication: one all-to-all; no gradient (callers write their own backward).
    """
    source, out = x.contiguous(), x.new_empty((sum(recv_splits), *x.shape[1:]))
    work = dist.all_to_all_single(out, source, recv_splits, send_splits, group=group, async_op=True)
    return Arrival(out, source, work)


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Arrival:
    """Begin what `all_gather` does.

    Communication: one all-gather; no gradient.
    """
    source, out = x.contiguous(), x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    work = dist.all_gather_into_tensor(out, source, group=group, async_op=True)
    return Arrival(out, source, work)


Sections = tuple[tuple[int, int], ...]
"""(channels, blocks) of each part of a tensor's last axis. A part is dealt out in equal blocks, one to each
rank in order; where there are fewer blocks than ranks, as many neighbours as it takes get the same one."""


def cp2hp(
    xs_sBC: Sequence[Tensor], sections: Sequence[Sections], plan: StreamPlan, cp_group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """From this rank's tokens with all channels to all tokens with this rank's channels.

    Args:
        xs_sBC: tensors [s, B, C], channels next to each other.
        sections: how the channels of each of them are dealt out.
        plan: layout and sizes of the microbatch.
        cp_group: ranks sharing the stream.

    Returns:
        [S, B, c] for each, tokens in stream order; views of one tensor.

    Communication: one all-to-all of cp*s*B*(all c) elements, of which (cp-1)/cp leave the rank; the same in
    backward.
    """
    return _TokensToHeads.apply(plan, cp_group, tuple(sections), *xs_sBC)


def hp2cp(x_SBc: Tensor, plan: StreamPlan, cp_group: dist.ProcessGroup) -> Tensor:
    """Inverse of `cp2hp`: [S, B, c] in stream order to [s, B, cp * c], channels by rank."""
    sections = (((plan.cp_size * x_SBc.shape[-1], plan.cp_size),),)
    return _HeadsToTokens.apply(plan, cp_group, sections, x_SBc)[0]


class _TokensToHeads(torch.autograd.Function):
    """[s, B, C] each to [S, B, c] each: one pass over memory on either side of the all-to-all."""

    @staticmethod
    def forward(ctx, plan: StreamPlan, group: dist.ProcessGroup, sections: Sequence[Sections], *xs: Tensor):
        ctx.work = plan, group, sections
        widths = _widths(sections)
        sent = xs[0].new_empty(plan.cp_size, *xs[0].shape[:2], sum(map(sum, widths)))
        for whole, dealt in _blocks(xs, sections, sent):
            _copy(dealt, whole.permute(2, 0, 1, 3).unsqueeze(1).expand_as(dealt))
        splits = [1] * plan.cp_size
        received = start_all_to_all(sent, group, splits, splits).wait().flatten(0, 1)
        return _to_stream(received, plan).split([sum(w) for w in widths], dim=-1)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, None, *_HeadsToTokens.apply(*ctx.work, *grads)


class _HeadsToTokens(torch.autograd.Function):
    """The adjoint: [S, B, c] each to [s, B, C] each; copies of one block are added up."""

    @staticmethod
    def forward(ctx, plan: StreamPlan, group: dist.ProcessGroup, sections: Sequence[Sections], *xs: Tensor):
        ctx.work = plan, group, sections
        widths = [sum(w) for w in _widths(sections)]
        sent = xs[0].new_empty(*xs[0].shape[:2], sum(widths))
        for x, part in zip(xs, sent.split(widths, dim=-1), strict=True):
            _put_stacked(x, part, plan)
        sent, splits = sent.unflatten(0, (plan.cp_size, -1)), [1] * plan.cp_size
        received = start_all_to_all(sent, group, splits, splits).wait()
        channels = [sum(size for size, _ in parts) for parts in sections]
        outs = tuple(received.new_empty(*received.shape[1:3], c) for c in channels)
        for whole, dealt in _blocks(outs, sections, received):
            block = dealt.sum(1) if dealt.shape[1] > 1 else dealt.squeeze(1)
            _copy(whole, block.permute(1, 2, 0, 3))
        return outs

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, None, *_TokensToHeads.apply(*ctx.work, *grads)


def _widths(sections: Sequence[Sections]) -> list[list[int]]:
    """Channels that one rank has of every section of every tensor."""
    return [[size // blocks for size, blocks in parts] for parts in sections]


def _blocks(
    xs: Sequence[Tensor], sections: Sequence[Sections], stacked: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of each section: [s, B, blocks, width] of its tensor, [blocks, copies, s, B, width] of `stacked`.

    xs: [s, B, C] each; stacked: [cp, s, B, all widths].
    """
    offset = 0
    for x, parts, widths in zip(xs, sections, _widths(sections), strict=True):
        for part, (_, blocks), width in zip(
            x.split([size for size, _ in parts], dim=-1), parts, widths, strict=True
        ):
            dealt = stacked[..., offset : offset + width].unflatten(0, (blocks, -1))
            yield part.unflatten(-1, (blocks, width)), dealt
            offset += width


def _to_stream(stacked: Tensor, plan: StreamPlan) -> Tensor:
    """All ranks' tokens stacked by rank, [S, ...] contiguous, in stream order; itself when contiguous."""
    if plan.layout == "contiguous":
        return stacked
    (words,) = _as_words(stacked)
    in_order = words.unflatten(0, (-1, plan.span_len)).index_select(0, plan.stacked_to_stream)
    return in_order.flatten(0, 1).view(stacked.dtype)


def _put_stacked(x: Tensor, out: Tensor, plan: StreamPlan) -> None:
    """Inverse of `_to_stream`, written into `out` [S, ...]; both of any strides."""
    if plan.layout == "contiguous":
        _copy(out, x)
        return
    out, x = (y.unflatten(0, (-1, plan.span_len)) for y in _as_words(out, x))
    out.index_copy_(0, plan.stacked_to_stream, x)


def _copy(to: Tensor, x: Tensor) -> None:
    """`to.copy_(x)`."""
    to, x = _as_words(to, x)
    to.copy_(x)


def _as_words(*xs: Tensor) -> tuple[Tensor, ...]:
    """The same memory in words of 8 bytes, if all are made of such: torch copies views element by element."""
    per_word = 8 // xs[0].element_size()

    def whole(x: Tensor) -> bool:
        *strides, last = x.stride()
        return last == 1 and not any(n % per_word for n in (*strides, x.shape[-1], x.storage_offset()))

    return tuple(x.view(torch.int64) for x in xs) if all(map(whole, xs)) else xs


def exchange_halo(tails_RtC: Tensor, plan: StreamPlan, cp_group: dist.ProcessGroup) -> Tensor:
    """The last t tokens before each row, from whichever rank holds them.

    Args:
        tails_RtC: last t tokens of each of this rank's rows, [R, t, C].
        plan: layout and sizes of the microbatch.
        cp_group: ranks sharing the stream.

    Returns:
        [R, t, C]; zeros before the stream's first token. Whether a document continues across the
        border is not looked at here: the convolution masks by position.

    Communication: one all-to-all of at most spans_per_rank*B*t*C elements; the same in backward.
    """
    sends, receives = cp_layout.halo_routes(plan.layout, plan.cp_size, plan.cp_rank)
    tails = tails_RtC.reshape(-1, plan.batch, *tails_RtC.shape[1:])
    slots = tails.unbind(0)
    send_splits, recv_splits = [0] * plan.cp_size, [0] * plan.cp_size
    for rank, _ in sends:
        send_splits[rank] += 1
    for rank, _ in receives:
        recv_splits[rank] += 1
    outgoing = torch.stack([slots[slot] for _, slot in sends]) if sends else tails[:0]
    incoming = all_to_all(outgoing, cp_group, send_splits, recv_splits)
    # Read even where nothing arrives, so that the exchange has a backward on every rank.
    nothing, *arrivals = torch.cat([torch.zeros_like(tails[:1]), incoming]).unbind(0)
    before = [nothing] * len(slots)
    for arrival, (_, slot) in zip(arrivals, receives, strict=True):
        before[slot] = arrival
    return torch.cat(before)


class StatesBetweenRanks:
    """What enters each of this rank's rows: the recurrent state, or from behind its gradient.

    The `rows.StateExchange` of ranks that share a stream. A row is an affine map of the state that enters
    it: X_out = M X_in + S. M is exactly zero where a document begins inside the row, so that no state
    passes through; a row that begins with a document is still handed the state before it. The gradient
    runs backwards through the same maps, with M^T for M.

    Communication: one all-gather of R*H*K*(K+V) fp32 values per rank, and for the gradient either one
    reduce-scatter of the same size (autograd's) or a second all-gather (`start_reverse`); independent of
    the number of tokens.
    Source: the affine form of the gated delta rule, Yang et al., "Gated Delta Networks" (2024); the
    exchange of (M, S) between ranks as in flash-linear-attention, fla/ops/cp.
    """

    def __init__(self, plan: StreamPlan, cp_group: dist.ProcessGroup):
        """For the rows of a microbatch.

        Args:
            plan: layout and sizes of the microbatch.
            cp_group: ranks sharing the stream.
        """
        self._plan, self._group = plan, cp_group

    def __call__(self, summaries: Tensor) -> Tensor:
        """See `rows.StateExchange`."""
        return _scan(all_gather(self._by_span(summaries), self._group), self._plan)

    def start_reverse(self, summaries: Tensor) -> Callable[[], Tensor]:
        """See `rows.StateExchange`."""
        arrival = start_all_gather(self._by_span(summaries), self._group)
        return lambda: _scan(arrival.wait(), self._plan, reverse=True)

    def _by_span(self, summaries: Tensor) -> Tensor:
        """[R, ...] as [spans, B, ...]."""
        return summaries.unflatten(0, (-1, self._plan.batch))


def _scan(gathered: Tensor, plan: StreamPlan, reverse: bool = False) -> Tensor:
    """[all spans, B, H, K, K + V] in rank order to what enters this rank's rows, [R, H, K, V].

    `reverse`: from the end of the stream: what enters a row comes from the row behind it.
    """
    by_slot, key_dim = gathered.unbind(0), gathered.shape[-2]
    order = cp_layout.stacked_to_stream(plan.layout, plan.cp_size)
    mine = cp_layout.rank_spans(plan.layout, plan.cp_size, plan.cp_rank)
    if reverse:
        order, mine = order[::-1], [len(order) - 1 - span for span in mine]
    state = torch.zeros_like(by_slot[0][..., key_dim:])
    entering = [state]
    for slot in order[:-1]:
        m, s = by_slot[slot].tensor_split([key_dim], dim=-1)
        state = torch.matmul(m, state) + s
        entering.append(state)
    # Stacked before any is chosen: a rank that needs none of the others' summaries has to take part in
    # the backward exchange all the same.
    entering = torch.stack(entering).unbind(0)
    return torch.cat([entering[place] for place in mine])
