"""Blocks of attention against the per-token reference, forward and backward."""

import pytest
import torch

from megatron_gdn.ops import attention as ops
from megatron_gdn.ops import attention_cudnn, attention_cudnn_packed, attention_torch
from megatron_gdn.rows import Rows
from tests.helpers.cases import FP32_TRUTH, FP64_TRUTH, PACKINGS, Packing
from tests.helpers.compare import assert_close
from tests.helpers.reference import attention_reference

CPU = torch.device("cpu")
HEADS = {"mha": (4, 4, 16), "gqa2": (4, 2, 16), "gqa4": (8, 2, 16), "mqa": (4, 1, 8)}
SCALE = 0.3
FLASH = 6e-3
"""bfloat16 kernel against float64: P and dS are rounded to 8 bits before they are multiplied."""


def _inputs(packing: Packing, heads: tuple[int, int, int], dtype=torch.float64, device=CPU):
    """Random q, k, v and upstream gradient, [B, S, heads, D]."""
    num_heads, num_groups, head_dim = heads
    shape = (packing.batch, packing.seq_len)
    return tuple(
        torch.randn(*shape, n, head_dim, dtype=dtype, device=device)
        for n in (num_heads, num_groups, num_groups, num_heads)
    )


def _truth(q, k, v, do, packing: Packing, scale: float = SCALE):
    """Reference o, dq, dk, dv in float64."""
    leaves = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    o = attention_reference(*leaves, packing.positions, scale)
    return o.detach(), *torch.autograd.grad(o, leaves, do.double().cpu())


def _run(q, k, v, do, packing: Packing, scale: float = SCALE):
    """The same through the door."""
    rows = Rows.from_ranges(packing.borders, ((0, packing.seq_len),), packing.batch, q.device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = ops.attention(*leaves, scale, rows)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64_TRUTH), (torch.float32, FP32_TRUTH)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_attention_matches_reference(packing, heads, dtype, tolerance):
    """Output and gradients of q, k and v, for every packing and ratio of heads."""
    packing = PACKINGS[packing]
    inputs = _inputs(packing, HEADS[heads], dtype)
    for name, got, want in zip(
        ("o", "dq", "dk", "dv"), _run(*inputs, packing), _truth(*inputs, packing), strict=True
    ):
        assert_close(name, got, want, tolerance, dtype=dtype)


def test_attention_skips_keys_of_other_documents(monkeypatch):
    """Many short documents are not paid for as one long one: a tile reads the keys it can reach."""
    packing = Packing(2048, tuple(range(0, 2049, 8)))
    products = []
    plain = attention_torch._scores

    def counted(q, k, *rest):
        products.append(q.shape[2] * k.shape[2])
        return plain(q, k, *rest)

    monkeypatch.setattr(attention_torch, "_scores", counted)
    _run(*_inputs(packing, (1, 1, 8)), packing)
    assert (
        sum(products) == 2 * 2048 * attention_torch.TILE
    )  # forward and backward; the whole square is 2048 * 2048 each


def test_attention_bf16_accumulates_in_fp32():
    """bfloat16 in, bfloat16 out, and no rounding in between: as the fp32 path on the same values."""
    packing = PACKINGS["several_chunks"]
    inputs = _inputs(packing, HEADS["gqa2"], torch.bfloat16)
    o, *_ = _run(*inputs, packing)
    want, *_ = _run(*(x.float() for x in inputs), packing)
    assert_close("o", o, want.bfloat16(), 0.0)


def test_blocks_merge_to_the_whole():
    """A square and the rectangles before it give output, lse and gradients of all keys at once.

    The rows are the spans of a cut that documents lie across; only documents that cross a span's
    start have a rectangle, here found by hand: (span, queries, keys).
    """
    packing = Packing(96, (0, 20, 70, 96))
    q, k, v, do = _inputs(packing, HEADS["gqa2"])
    whole = Rows.from_ranges(packing.borders, ((0, 96),), 1, CPU)
    o_want, lse_want = ops.forward(q, k, v, SCALE, whole)
    want = _truth(q, k, v, do, packing)
    spans = ((0, 32), (32, 64), (64, 96))
    rectangles = [(1, 32, (20, 32)), (2, 6, (20, 40)), (2, 6, (40, 64))]

    rows = Rows.from_ranges(packing.borders, spans, 1, CPU)
    by_span = [x.reshape(3, 32, *x.shape[2:]) for x in (q, k, v, do)]
    o, lse = ops.forward(*by_span[:3], SCALE, rows)
    for span, length, (first, last) in rectangles:
        part = ops.forward(by_span[0][span, :length][None], k[:, first:last], v[:, first:last], SCALE)
        ops.merge_(o[span, :length][None], lse[span, :, :length][None], *part)
    assert_close("o", o.reshape(o_want.shape), o_want, FP64_TRUTH)
    assert_close("lse", lse.transpose(0, 1).reshape(1, 4, 96), lse_want, FP64_TRUTH)

    grads = list(ops.backward(by_span[3], *by_span[:3], o, lse, SCALE, rows))
    grads = [g.reshape(1, 96, *g.shape[2:]).clone() for g in grads]
    for span, length, (first, last) in rectangles:
        do_part, q_part, o_part = (x[span, :length][None] for x in (by_span[3], by_span[0], o))
        dq, dk, dv = ops.backward(
            do_part,
            q_part,
            k[:, first:last],
            v[:, first:last],
            o_part,
            lse[span, :, :length][None],
            SCALE,
        )
        grads[0][:, 32 * span : 32 * span + length] += dq
        grads[1][:, first:last] += dk
        grads[2][:, first:last] += dv
    for name, got, expected in zip(("dq", "dk", "dv"), grads, want[1:], strict=True):
        assert_close(name, got, expected, FP64_TRUTH)


def test_merge_of_very_different_sizes_stays_finite():
    """Scores of one block may be far above those of the other."""
    packing = Packing(32)
    q, k, v, do = _inputs(packing, HEADS["mha"])
    k[:, 16:] *= 300
    rows = Rows.from_ranges((0, 16), ((0, 16),), 1, CPU)
    o, lse = ops.forward(q[:, 16:], k[:, 16:], v[:, 16:], SCALE, rows)
    ops.merge_(o, lse, *ops.forward(q[:, 16:], k[:, :16], v[:, :16], SCALE))
    assert_close("o", o, _truth(q, k, v, do, packing)[0][:, 16:], FP64_TRUTH)


def test_backend_name():
    """The kernel is chosen by device, dtype and head dim."""
    cuda = torch.device("cuda")
    assert ops.backend_name(CPU, torch.bfloat16, 256) == "torch"
    assert ops.backend_name(cuda, torch.float32, 256) == "torch"
    assert ops.backend_name(cuda, torch.bfloat16, 512) == "torch"
    assert ops.backend_name(cuda, torch.bfloat16, 256) == "FlashAttention-2 (torch)"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 2, 64), (16, 2, 256)])
@pytest.mark.parametrize("packing", PACKINGS)
def test_flash_matches_reference(packing, heads, dtype):
    """Squares with and without document borders in them, on the GPU's kernel."""
    packing = PACKINGS[packing]
    inputs, scale = _inputs(packing, heads, dtype, torch.device("cuda")), heads[2] ** -0.5
    got, want = _run(*inputs, packing, scale), _truth(*inputs, packing, scale)
    for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(name, g, w, FLASH, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
def test_flash_blocks_match_torch_blocks(batch):
    """A rectangle and a square, lse and gradients, on views as context parallelism makes them."""
    heads, device, dtype = (16, 2, 256), torch.device("cuda"), torch.bfloat16
    packing = Packing(512, None, batch)
    q, k, v, do = _inputs(packing, heads, dtype, device)
    borders = (0, 512) if batch > 1 else (0, 300, 512)
    rows = Rows.from_ranges(borders, ((256, 512),), batch, device)
    cases = {
        "square": (q[:, 256:], k[:, 256:], v[:, 256:], rows),
        "rectangle": (q[:, 256:300], k[:, 17:256], v[:, 17:256], None),
    }
    for name, (q_part, k_part, v_part, borders) in cases.items():
        # tokens first, two in one buffer, as the ring sends them
        kv = torch.stack([k_part.transpose(0, 1), v_part.transpose(0, 1)], dim=1)
        k_view, v_view = kv.permute(1, 2, 0, 3, 4)
        o, lse = ops.forward(q_part, k_view, v_view, SCALE, borders)
        o_want, lse_want = attention_torch.forward(q_part, k_part, v_part, SCALE, borders)
        assert_close(f"{name} o", o.float(), o_want, FLASH)
        assert_close(f"{name} lse", lse, lse_want, FP32_TRUTH)
        do_part = do[:, : q_part.shape[1]]
        got = ops.backward(do_part, q_part, k_view, v_view, o_want.to(dtype), lse_want, SCALE, borders)
        want = attention_torch.backward(
            do_part, q_part, k_part, v_part, o_want.to(dtype), lse_want, SCALE, borders
        )
        for part, g, w in zip(("dq", "dk", "dv"), got, want, strict=True):
            assert_close(f"{name} {part}", g.float(), w, FLASH)
