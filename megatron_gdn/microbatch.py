"""This rank's part of a microbatch: documents found, plan made and tokens cut on the CPU, once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gdn.cp_layout import CPLayout
from megatron_gdn.stream import StreamParams, StreamPlan, TokensAhead


@dataclass(frozen=True)
class Microbatch:
    """Legend: B rows, s tokens of this CP rank per row."""

    tokens: Tensor
    """[B, s], int64."""
    labels: Tensor
    """[B, s], int64: the token after each token."""
    loss_mask: Tensor
    """[B, s], float32: 1 where the label counts."""
    position_ids: Tensor
    """[B, s], int64: position in the document (packed) or in the row."""
    params: StreamParams
    """What every layer gets."""
    num_tokens: int
    """Labels that count in the whole microbatch, all CP ranks together."""
    num_tokens_local: int
    """Labels that count among this rank's."""


def cut_microbatch(
    sample: dict[str, Tensor],
    *,
    packed: bool,
    layout: CPLayout,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
    mtp_num_layers: int = 0,
) -> Microbatch:
    """Cut one rank's part out of a microbatch that every CP rank has read alike.

    Args:
        sample: CPU tensors `tokens`, `labels`, `loss_mask`, `position_ids`, each [samples, S], as the
            host's GPTDataset gives them; `cu_seqlens` [samples, S + 1] if it marks documents.
        packed: keep documents apart and lay the samples end to end as one stream; else each sample is
            a stream of its own and documents in it see each other.
        layout: order of tokens across CP ranks.
        cp_size: ranks that share the stream.
        cp_rank: this one.
        device: where the model runs.
        mtp_num_layers: depths of multi-token prediction to make `params.ahead` for.

    Raises:
        ValueError: the stream cannot be cut into equal spans.

    Communication: none, and no copy from the device.
    """
    samples, length = sample["tokens"].shape
    whole = {name: sample[name] for name in ("tokens", "labels", "loss_mask", "position_ids")}
    borders = document_borders(sample) if packed else tuple(range(0, samples * length + 1, length))
    if packed:
        plan = StreamPlan(layout, cp_size, cp_rank, samples * length, 1, borders, device)
    else:
        plan = StreamPlan(layout, cp_size, cp_rank, length, samples, (0, length), device)

    def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        streams = {name: tensor.reshape(plan.batch, plan.seq_len) for name, tensor in tensors.items()}
        return {name: torch.cat([t[:, a:b] for a, b in plan.ranges], dim=1) for name, t in streams.items()}

    def move(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    num_tokens = int(whole["loss_mask"].sum())
    ahead = []
    for depth in range(1, mtp_num_layers + 1):
        shifted = shift_in_documents(sample, borders, depth)
        ahead.append(
            TokensAhead(
                **move(cut(shifted)), num_targets=int(shifted["loss_mask"].sum()), num_labels=num_tokens
            )
        )
    local = cut(whole)
    return Microbatch(
        **move(local),
        params=_stream_params(plan, packed, tuple(ahead)),
        num_tokens=num_tokens,
        num_tokens_local=int(local["loss_mask"].sum()),
    )


def shift_in_documents(sample: dict[str, Tensor], borders: tuple[int, ...], depth: int) -> dict[str, Tensor]:
    """Tokens, labels and loss mask, each moved `depth` places towards the start of its document.

    What would come from behind the document is zero and does not count. Nor does the label of a
    document's last token if that document ends inside the sample: it is the first token of the next one.
    A sample's last label counts; the dataset read it from behind the sample.

    Args:
        sample: CPU tensors `tokens`, `labels`, `loss_mask`, each [samples, S].
        borders: document borders in the samples laid end to end, from 0 to samples x S.
        depth: places to move by.

    Returns:
        `tokens`, `labels`, `loss_mask`, each [samples x S], of the same dtypes.
    """
    lengths = torch.tensor(borders).diff()
    ends = torch.tensor(borders[1:]).repeat_interleave(lengths)
    left = ends - torch.arange(len(ends)) - depth  # tokens of the document from where it is read to its end
    counts = (left > 1) | ((left == 1) & (ends % sample["tokens"].shape[1] == 0))
    kept = {"tokens": left > 0, "labels": counts, "loss_mask": counts}
    return {name: sample[name].flatten().roll(-depth) * keep for name, keep in kept.items()}


def document_borders(sample: dict[str, Tensor]) -> tuple[int, ...]:
    """Where documents begin and end in the samples laid end to end, from 0 to samples x S.

    Taken from `cu_seqlens` where the dataset gives it (each row padded with S), else from position ids,
    which restart at 0 with every document. A sample always starts a document.
    """
    samples, length = sample["tokens"].shape
    if "cu_seqlens" in sample:
        rows = [[start for start in row if start < length] for row in sample["cu_seqlens"].tolist()]
    else:
        rows = [(row == 0).nonzero().flatten().tolist() for row in sample["position_ids"]]
    starts = [number * length + start for number, row in enumerate(rows) for start in row]
    return (*starts, samples * length)


def _stream_params(plan: StreamPlan, packed: bool, ahead: tuple[TokensAhead, ...]) -> StreamParams:
    if not packed:
        return StreamParams(qkv_format="sbhd", plan=plan, ahead=ahead)
    borders = torch.tensor(plan.cu_seqlens, dtype=torch.int32).to(plan.device, non_blocking=True)
    longest = max(b - a for a, b in zip(plan.cu_seqlens, plan.cu_seqlens[1:], strict=False))
    return StreamParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=plan,
        ahead=ahead,
    )
