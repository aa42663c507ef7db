"""Blocks of attention against the per-token reference, forward and backward."""

from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.ops import attention as ops
from megatron_gdn.ops import attention_cudnn, attention_cudnn_packed, attention_torch
from megatron_gdn.rows import Rows
from tests.helpers.cases import EXACT, FP32_TRUTH, FP64_TRUTH, PACKINGS, Packing
from tests.helpers.compare import assert_close
from tests.helpers.reference import attention_reference

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
HEADS = {"mha": (4, 4, 16), "gqa2": (4, 2, 16), "gqa4": (8, 2, 16), "mqa": (4, 1, 8)}
SCALE = 0.3
BF16_KERNEL = 6e-3
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


BACKENDS = {
    # (on Hopper, nvidia-cudnn-frontend installed): what `backend_name` says
    "all cuDNN": (True, True, "cuDNN"),
    "dense cuDNN": (
        True,
        False,
        "cuDNN; packed: FlashAttention-2 (torch), since nvidia-cudnn-frontend is not installed",
    ),
    "no cuDNN": (False, True, "FlashAttention-2 (torch)"),
}


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Each set of kernels in turn; on a GPU only those that it and the packages there can run."""
    hopper, frontend, name = BACKENDS[request.param]
    if request.node.get_closest_marker("gpu"):
        if hopper and not attention_cudnn.takes(GPU, torch.bfloat16, 256):
            pytest.skip("needs a Hopper GPU")
        if hopper and frontend and not attention_cudnn_packed.available():
            pytest.skip("needs nvidia-cudnn-frontend")
    monkeypatch.setattr(attention_cudnn, "_is_hopper", lambda device: hopper)
    monkeypatch.setattr(attention_cudnn_packed, "available", lambda: frontend)
    monkeypatch.setattr(attention_cudnn_packed, "MIN_LONGEST", 10)  # or no test is long enough
    return request.param


def test_backend_name(backend):
    """The kernels are chosen by device, dtype and head dim, and by what is installed."""
    assert ops.backend_name(CPU, torch.bfloat16, 256) == "torch"
    assert ops.backend_name(GPU, torch.float32, 256) == "torch"
    assert ops.backend_name(GPU, torch.bfloat16, 512) == "torch"
    assert ops.backend_name(GPU, torch.bfloat16, 256) == BACKENDS[backend][2]
    assert ops.backend_name(GPU, torch.bfloat16, 40) == "FlashAttention-2 (torch)"


def test_each_block_goes_to_its_kernel(backend):
    """Sizes that recur go to the kernel planned for each, pieces to the packed one unless all are short."""

    def kernel(row_len, borders=None, recurs=False):
        rows = borders and Rows.from_ranges(borders, ((0, row_len),), 1, CPU)
        q = SimpleNamespace(device=GPU, dtype=torch.bfloat16, shape=(1, row_len, 2, 64))
        return ops._kernels(q, rows, recurs).__name__.rpartition("attention_")[2]

    recurring = "flash" if backend == "no cuDNN" else "cudnn"
    other = "cudnn_packed" if backend == "all cuDNN" else "flash"
    assert kernel(128, (0, 128)) == recurring
    assert kernel(128, recurs=True) == recurring
    assert kernel(128, (0, 100, 128)) == other
    assert kernel(128) == other
    assert kernel(32, (0, 32)) == other
    assert kernel(128, tuple(range(0, 129, 8))) == "flash"


def test_pieces_of_documents():
    """Starts and lengths of all pieces of all rows, filled up with empty ones; sizes rounded up."""
    rows = Rows.from_ranges((0, 23, 75, 101, 300), ((0, 64), (64, 128)), 1, CPU)
    pieces = attention_cudnn_packed.Pieces.of_documents(rows)
    assert pieces.starts.tolist() == [0, 23, 64, 75, 101, 128, 128, 128, 128]
    assert pieces.lengths.tolist() == [23, 41, 11, 26, 27, 0, 0, 0]
    assert (pieces.longest, pieces.total) == (128, 128)
    assert attention_cudnn_packed.Pieces.of_documents(rows) is pieces
    pieces = attention_cudnn_packed.Pieces.of_rows(3, 130, CPU)
    assert pieces.starts.tolist() == [0, 130, 260, 390]
    assert (pieces.lengths.tolist(), pieces.longest, pieces.total) == ([130] * 3, 256, 768)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("heads", [(4, 2, 64), (16, 2, 256)])
@pytest.mark.parametrize("packing", PACKINGS)
def test_gpu_attention_matches_reference(packing, heads, backend):
    """Squares with and without document borders in them, on the GPU's kernels."""
    packing = PACKINGS[packing]
    inputs, scale = _inputs(packing, heads, torch.bfloat16, GPU), heads[2] ** -0.5
    got, want = _run(*inputs, packing, scale), _truth(*inputs, packing, scale)
    for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(name, g, w, BF16_KERNEL, dtype=torch.bfloat16)


def _tokens_first(x):
    """The same values laid out as [tokens, rows, ...]."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("packing", ["one_document", "borders_off_spans"])
def test_gpu_attention_in_float16(packing, backend):
    """The other half precision, with values that lie inside a wider tensor."""
    packing = PACKINGS[packing]
    q, k, v, do = _inputs(packing, (4, 2, 64), torch.float16, GPU)
    v = torch.cat([k, v], dim=-1)[..., 64:]
    got, want = _run(q, k, v, do, packing), _truth(q, k, v, do, packing)
    for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(name, g, w, BF16_KERNEL, dtype=torch.float16)


@pytest.mark.gpu(1)
def test_gpu_attention_of_a_batch_tokens_first(backend):
    """Rows of a batch as a model has them, the gradient in another layout than the result."""
    packing = Packing(256, None, 3)
    q, k, v, do = _inputs(packing, (16, 2, 256), torch.bfloat16, GPU)
    want = _truth(q, k, v, do, packing)
    for upstream in (do, _tokens_first(do), do.transpose(1, 2).contiguous().transpose(1, 2)):
        got = _run(_tokens_first(q), _tokens_first(k), _tokens_first(v), upstream, packing)
        for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
            assert_close(name, g, w, BF16_KERNEL, dtype=torch.bfloat16)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("recurs", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_gpu_blocks_match_torch_blocks(batch, recurs, backend):
    """Rectangles and a square, lse and gradients, on views as context parallelism makes them."""
    heads, dtype = (16, 2, 256), torch.bfloat16
    packing = Packing(512, None, batch)
    q, k, v, do = _inputs(packing, heads, dtype, GPU)
    borders = (0, 512) if batch > 1 else (0, 300, 512)
    rows = Rows.from_ranges(borders, ((256, 512),), batch, GPU)
    cases = {
        "square": (q[:, 256:], k[:, 256:], v[:, 256:], rows),
        "wide": (q[:, 256:325], k[:, 17:256], v[:, 17:256], None),
        "tall": (q[:, 256:], k[:, 17:18], v[:, 17:18], None),
        "one query": (q[:, 256:257], k[:, :256], v[:, :256], None),
    }
    for name, (q_part, k_part, v_part, borders) in cases.items():
        # tokens first, two in one buffer, as the ring sends them
        kv = torch.stack([k_part.transpose(0, 1), v_part.transpose(0, 1)], dim=1)
        k_view, v_view = kv.permute(1, 2, 0, 3, 4)
        o, lse = ops.forward(q_part, k_view, v_view, SCALE, borders, recurs=recurs)
        o_want, lse_want = attention_torch.forward(q_part, k_part, v_part, SCALE, borders)
        assert_close(f"{name} o", o.float(), o_want, BF16_KERNEL)
        assert_close(f"{name} lse", lse, lse_want, FP32_TRUTH)
        # the result over further keys, of which these are a part
        o_all, lse_all = o_want.clone(), lse_want.clone()
        ops.merge_(o_all, lse_all, torch.randn_like(o), torch.randn_like(lse_want) + 3)
        do_part = do[:, : q_part.shape[1]]
        inputs = do_part, q_part, k_view, v_view, o_all.to(dtype), lse_all, SCALE, borders
        got = ops.backward(*inputs, recurs=recurs)
        want = attention_torch.backward(*inputs)
        for part, g, w in zip(("dq", "dk", "dv"), got, want, strict=True):
            assert_close(f"{name} {part}", g.float(), w, BF16_KERNEL)


@pytest.mark.gpu(1)
def test_gpu_merge_matches_torch():
    """One pass over memory gives what the formula gives, on views, also where one part counts for nothing."""
    o = torch.randn(2, 45, 3, 72, device=GPU)
    lse = (torch.randn(2, 40, 3, device=GPU) * 5).transpose(1, 2)
    part, part_lse = torch.randn(2, 37, 3, 72, device=GPU).bfloat16(), torch.randn(2, 3, 37, device=GPU) * 5
    part_lse[0, 0, 0], part_lse[0, 0, 1], lse[0, 0, 2] = -float("inf"), 400.0, -500.0
    want = o.double().clone(), lse.double().clone()
    ops.merge_(want[0][:, :37], want[1][:, :, :37], part.double(), part_lse.double())
    ops.merge_(o[:, :37], lse[:, :, :37], part, part_lse)
    assert_close("o", o, want[0], FP32_TRUTH, dtype=torch.float32)
    assert_close("lse", lse, want[1], FP32_TRUTH, dtype=torch.float32)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("packing", ["one_document", "several_chunks"])
def test_gpu_attention_can_be_deterministic(packing, backend):
    """torch.use_deterministic_algorithms gives the same bits twice."""
    inputs = _inputs(PACKINGS[packing], (16, 2, 256), torch.bfloat16, GPU)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (_run(*inputs, PACKINGS[packing]) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, a, b in zip(("o", "dq", "dk", "dv"), first, second, strict=True):
        assert_close(name, a, b, EXACT)
