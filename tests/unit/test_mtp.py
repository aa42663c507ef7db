"""Multi-token prediction: what is shifted stays in its document, however the stream is cut."""

from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.microbatch import cut_microbatch, shift_in_documents
from megatron_gdn.multi_token_prediction import tokens_ahead
from megatron_gdn.stream import StreamParams
from tests.helpers.compare import join_parts

CPU = torch.device("cpu")
LENGTH = 32
SHIFTED = ("tokens", "labels", "loss_mask")
# Two samples. Borders at, before and behind the span borders 4, 8, ...; documents of one and two tokens.
DOCUMENTS = ([0, 1, 3, 4, 7, 8, 15, 17, 31, 32], [0, 9, 16, 24, 25, 32])


def make_sample(documents=DOCUMENTS) -> dict[str, torch.Tensor]:
    """Token i of the stream is i + 1, so that zero is no token; a third of the labels do not count."""
    shape = (len(documents), LENGTH)
    tokens = torch.arange(1, len(documents) * LENGTH + 1).view(shape)
    positions = [torch.cat([torch.arange(b - a) for a, b in zip(d, d[1:], strict=False)]) for d in documents]
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": (torch.rand(shape) > 1 / 3).float(),
        "position_ids": torch.stack(positions),
    }


def shifted_truth(sample, documents, depth) -> dict[str, torch.Tensor]:
    """Token by token, by the definition: the target of position i is the token at i + depth + 1."""
    out = {name: torch.zeros_like(sample[name]) for name in SHIFTED}
    for row, borders in enumerate(documents):
        for start, end in zip(borders, borders[1:], strict=False):
            for i in range(start, end):
                read = i + depth
                if read < end:
                    out["tokens"][row, i] = sample["tokens"][row, read]
                # Behind a document that ends inside the sample is another document.
                if read + 1 < end or read + 1 == end == LENGTH:
                    out["labels"][row, i] = sample["labels"][row, read]
                    out["loss_mask"][row, i] = sample["loss_mask"][row, read]
    return out


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_cut_microbatch_shift_then_cut(cp, layout, packed):
    """What the ranks hold, joined, is the stream shifted as a whole; counts are those of the whole."""
    sample = make_sample()
    parts = [
        cut_microbatch(
            sample, packed=packed, layout=layout, cp_size=cp, cp_rank=r, device=CPU, mtp_num_layers=3
        )
        for r in range(cp)
    ]
    documents = DOCUMENTS if packed else [[0, LENGTH]] * 2
    for depth in (1, 2, 3):
        want = shifted_truth(sample, documents, depth)
        ahead = [part.params.ahead[depth - 1] for part in parts]
        for name in SHIFTED:
            got = join_parts([getattr(part, name) for part in ahead], layout, dim=1)
            assert torch.equal(got.reshape(2, LENGTH), want[name]), (depth, name)
        for part, each in zip(parts, ahead, strict=True):
            assert each.num_targets == want["loss_mask"].sum() > 0
            assert each.num_labels == part.num_tokens
            assert each.tokens.shape == part.tokens.shape
    assert all(len(part.params.ahead) == 3 for part in parts)


def test_shift_in_documents_with_empty_documents():
    """Borders that repeat change nothing."""
    sample = make_sample([[0, 5, LENGTH]])
    want = shift_in_documents(sample, (0, 5, LENGTH), 1)
    for name, got in shift_in_documents(sample, (0, 0, 5, 5, 5, LENGTH, LENGTH), 1).items():
        assert torch.equal(got, want[name])


def test_document_is_blind_to_the_next_one():
    """Another second document leaves all that the first one reads and predicts as it was."""
    sample = make_sample([[0, 11, LENGTH]])
    other = sample | {"tokens": sample["tokens"].clone(), "labels": sample["labels"].clone()}
    other["tokens"][0, 11:] += 100
    other["labels"][0, 10:] += 100  # the label of token 10 is token 11, of the second document
    for depth in (1, 2):
        before, after = (shift_in_documents(each, (0, 11, LENGTH), depth) for each in (sample, other))
        for name in SHIFTED:
            assert torch.equal(before[name][:11], after[name][:11]), (depth, name)
        assert not torch.equal(before["labels"], after["labels"])


def test_microbatch_carries_nothing_ahead_unless_asked():
    """Without multi-token prediction nothing is shifted."""
    part = cut_microbatch(make_sample(), packed=True, layout="zigzag", cp_size=2, cp_rank=0, device=CPU)
    assert part.params.ahead == ()


@pytest.mark.parametrize("params", [None, StreamParams(qkv_format="sbhd")])
def test_tokens_ahead_refuses_a_microbatch_without_them(params):
    """A model with one depth more than the data was made for does not train on something else."""
    with pytest.raises(ValueError, match="--mtp-num-layers 1 .*got 0.*cut_microbatch"):
        tokens_ahead(params, SimpleNamespace(mtp_num_layers=1))
