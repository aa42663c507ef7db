"""Bytes that context parallelism moves for one GatedDeltaNet layer: the design's arithmetic.

Every figure is what one rank sends to other ranks in one forward pass; the backward pass sends the same.
"""

from megatron_gdn import cp_layout
from megatron_gdn.cp_layout import CPLayout
from megatron_gdn.gated_delta_net_cp import Sections


def headwise_bytes(sections: Sections, tokens_local: int, cp_size: int, element_size: int = 2) -> int:
    """All-to-all of queries, keys, values, b and a to the heads' ranks, and of the output back.

    Args:
        sections: heads of one tensor-parallel rank, before context parallelism.
        tokens_local: tokens of this rank times batch.
        cp_size: ranks that share the stream.
        element_size: bytes of one activation.
    """
    heads = [max(n, cp_size) for n in sections.heads]  # fewer heads than ranks are copied
    dims = (sections.key_dim, sections.key_dim, sections.value_dim, 1, 1)
    going = sum(n * dim for n, dim in zip(heads, dims, strict=True))
    coming = sections.value_heads * sections.value_dim
    return tokens_local * (going + coming) * element_size * (cp_size - 1) // cp_size


def chunkwise_bytes(
    sections: Sections,
    cp_size: int,
    cp_rank: int = 0,
    *,
    layout: CPLayout = "zigzag",
    batch: int = 1,
    conv_width: int = 4,
    element_size: int = 2,
) -> int:
    """All-gather of the spans' summaries (fp32), and the tokens before each span. No token count enters.

    Args:
        sections: heads of one tensor-parallel rank.
        cp_size: ranks that share the stream.
        cp_rank: the rank whose bytes are counted; summaries are the same for all.
        layout: decides how many spans a rank holds and who follows whom.
        batch: streams side by side.
        conv_width: taps of the convolution.
        element_size: bytes of one activation.
    """
    key_dim, value_dim = sections.key_dim, sections.value_dim
    summary = sections.value_heads * key_dim * (key_dim + value_dim) * 4
    spans = cp_layout.spans_per_rank(layout, cp_size)
    sends, _ = cp_layout.halo_routes(layout, cp_size, cp_rank)
    halo = sum(sections.sizes[:3]) * (conv_width - 1) * element_size
    to_others = sum(rank != cp_rank for rank, _ in sends)
    return batch * (summary * spans * (cp_size - 1) + halo * to_others)


def all_gather_bytes(hidden_size: int, tokens_local: int, cp_size: int, element_size: int = 2) -> int:
    """What gathering the layer's input on every rank would send, the simplest way to run a recurrence."""
    return tokens_local * hidden_size * element_size * (cp_size - 1)
