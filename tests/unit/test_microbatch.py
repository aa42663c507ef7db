"""What each rank cuts out of a microbatch."""

import pytest
import torch

from megatron_gdn.microbatch import cut_microbatch, document_borders

CPU = torch.device("cpu")


def make_sample(samples: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens counted through all samples; every third label does not count."""
    tokens = torch.arange(samples * length).view(samples, length)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": (tokens % 3 != 0).float(),
        "position_ids": torch.arange(length).repeat(samples, 1),
    }


def cut(sample, **options):
    """`cut_microbatch` on the CPU."""
    return cut_microbatch(sample, device=CPU, **options)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_cut_microbatch_shares_out_every_token_once(layout, packed):
    """All ranks together hold the microbatch, labels and masks beside their tokens."""
    sample = make_sample(2, 8)
    parts = [cut(sample, packed=packed, layout=layout, cp_size=2, cp_rank=rank) for rank in range(2)]
    held = torch.cat([part.tokens.flatten() for part in parts])
    assert torch.equal(held.sort().values, torch.arange(16))
    for part in parts:
        assert torch.equal(part.labels, part.tokens + 1)
        assert torch.equal(part.loss_mask, (part.tokens % 3 != 0).float())
        assert part.num_tokens == 10
        assert part.num_tokens_local == part.loss_mask.sum()
        assert part.tokens.shape == ((1, 8) if packed else (2, 4))
    assert sum(part.num_tokens_local for part in parts) == 10


def test_cut_microbatch_zigzag_order():
    """Rank 0 holds the first and the last of four spans, per row or of the whole stream."""
    dense = cut(make_sample(2, 8), packed=False, layout="zigzag", cp_size=2, cp_rank=0)
    assert dense.tokens.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    packed = cut(make_sample(2, 8), packed=True, layout="zigzag", cp_size=2, cp_rank=0)
    assert packed.tokens.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]


def test_cut_microbatch_plan_of_dense_rows():
    """Without packing every row is one stream and one document."""
    part = cut(make_sample(2, 8), packed=False, layout="zigzag", cp_size=2, cp_rank=1)
    plan = part.params.plan
    assert (plan.seq_len, plan.batch, plan.cu_seqlens, plan.packed) == (8, 2, (0, 8), False)
    assert part.params.qkv_format == "sbhd" and part.params.cu_seqlens_q is None


def test_cut_microbatch_plan_of_packed_documents():
    """Documents of all samples stand one after another, in the host's form and in ours."""
    sample = make_sample(2, 8)
    padding = [8] * 5
    sample["cu_seqlens"] = torch.tensor([[0, 3, 8, 8, *padding], [0, 1, 2, 8, *padding]], dtype=torch.int32)
    part = cut(sample, packed=True, layout="contiguous", cp_size=2, cp_rank=1)
    borders = (0, 3, 8, 9, 10, 16)
    assert part.params.plan.cu_seqlens == borders
    assert part.params.plan.ranges == ((8, 16),)
    assert part.params.qkv_format == "thd"
    assert part.params.cu_seqlens_q.tolist() == list(borders)
    assert part.params.max_seqlen_q == 6


def test_document_borders_from_position_ids():
    """Position ids that restart say the same as cu_seqlens."""
    sample = make_sample(2, 4)
    sample["position_ids"] = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]])
    assert document_borders(sample) == (0, 2, 4, 5, 8)


def test_document_borders_keep_a_sample_of_one_document():
    """A sample starts a document even where nothing restarts in it."""
    assert document_borders(make_sample(3, 4)) == (0, 4, 8, 12)


def test_cut_microbatch_refuses_streams_that_do_not_divide():
    """Ten tokens cannot be four spans."""
    with pytest.raises(ValueError, match="multiple of 4"):
        cut(make_sample(1, 10), packed=False, layout="zigzag", cp_size=2, cp_rank=0)
