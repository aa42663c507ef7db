"""Statistics and gradients of logits made block by block, against whole fp64 logits; on a GPU its kernels."""

import pytest
import torch

from megatron_gdn.ops import linear_cross_entropy
from megatron_gdn.ops.linear_cross_entropy import vocab_gradients, vocab_statistics
from tests.helpers.cases import FP32_TRUTH
from tests.helpers.compare import assert_close

BF16 = 6e-3
"""bf16 logits and their bf16 gradients as operands of products: roundings of 2^-9 each."""
MACHINES = [
    pytest.param(("cpu", torch.float32), id="cpu-fp32"),
    pytest.param(("cpu", torch.bfloat16), id="cpu-bf16"),
    pytest.param(("cuda", torch.float32), id="cuda-fp32", marks=pytest.mark.gpu(1)),
    pytest.param(("cuda", torch.bfloat16), id="cuda-bf16", marks=pytest.mark.gpu(1)),
]
T, H = 37, 64


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 128 rows of the weight."""
    monkeypatch.setattr(linear_cross_entropy, "BLOCK_BYTES", 1)


def make_inputs(vocab: int, machine):
    """Hidden states, weight and labels; some labels are first, last, and outside on both sides."""
    device, dtype = machine
    hidden, weight = torch.randn(T, H) / H**0.5, torch.randn(vocab, H)
    labels = torch.randint(vocab, (T,))
    labels[:4] = torch.tensor([0, vocab - 1, -5, vocab])
    return hidden.to(device, dtype), weight.to(device, dtype), labels.to(device)


@pytest.mark.parametrize("vocab", (7, 128, 300, 1000))
@pytest.mark.parametrize("machine", MACHINES)
def test_statistics(machine, vocab, small_blocks):
    """Maximum, its place, sum of exponentials, and the label's logit where there is one."""
    hidden, weight, labels = make_inputs(vocab, machine)
    got = vocab_statistics(hidden, weight, labels, True)
    without = vocab_statistics(hidden, weight, labels, False)
    assert without.best is None
    assert all(torch.equal(x, y) for x, y in zip(got[:3], without[:3], strict=True))
    logits = (hidden @ weight.t()).double().cpu()
    labels = labels.cpu()
    maximum = logits.amax(-1)
    assert_close("maximum", got.maximum, maximum, FP32_TRUTH, dtype=torch.float32)
    at_best = logits.gather(1, got.best.cpu().unsqueeze(1)).squeeze(1)
    assert_close("logit at best", at_best, maximum, FP32_TRUTH)
    sum_exp = (logits - maximum.unsqueeze(-1)).exp().sum(-1)
    assert_close("sum", got.sum_exp, sum_exp, FP32_TRUTH, dtype=torch.float32)
    here = (labels >= 0) & (labels < vocab)
    target = got.target.cpu()
    assert_close("target", target[here].double(), logits[here, labels[here]], FP32_TRUTH)
    assert (target[~here] == -torch.inf).all()


@pytest.mark.parametrize("machine", MACHINES)
def test_best_is_the_first_of_equals(machine, small_blocks):
    """Equal logits in one block and in several."""
    weight = torch.zeros(500, 8)
    weight[[3, 5, 499], 0] = 2.0
    weight[[200, 201, 400], 1] = 2.0
    device, dtype = machine
    hidden, labels = torch.eye(8)[[0, 1, 2]], torch.zeros(3, dtype=torch.int64)
    got = vocab_statistics(hidden.to(device, dtype), weight.to(device, dtype), labels.to(device), True)
    assert got.best.tolist() == [3, 200, 0]


@pytest.mark.parametrize("vocab", (7, 300, 1000))
@pytest.mark.parametrize("machine", MACHINES)
def test_gradients(machine, vocab, small_blocks):
    """Of a sum with random weights; a label that is elsewhere leaves the softmax alone."""
    hidden, weight, labels = make_inputs(vocab, machine)
    upstream = torch.randn(T)
    exact = [x.cpu().double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].t()
    log_sum_exp = logits.logsumexp(-1)
    here = (labels.cpu() >= 0) & (labels.cpu() < vocab)
    target = torch.where(
        here, logits.gather(1, labels.cpu().clamp(0, vocab - 1).unsqueeze(1)).squeeze(1), 0.0
    )
    want = torch.autograd.grad((upstream.double() * (log_sum_exp - target)).sum(), exact)
    rest = [x.to(machine[0]) for x in (log_sum_exp.detach().float(), upstream)]
    got = vocab_gradients(hidden, weight, labels, *rest, True)
    tolerance = BF16 if machine[1] == torch.bfloat16 else FP32_TRUTH
    assert_close("d hidden", got[0], want[0], tolerance, dtype=torch.float32)
    assert_close("d weight", got[1], want[1], tolerance, dtype=machine[1])
    assert vocab_gradients(hidden, weight, labels, *rest, False)[1] is None


@pytest.mark.parametrize(
    ("length", "bytes_each", "size"),
    [(248_320, 2 * 32_768, 15_616), (32_768, 2 * 248_320, 2048), (100, 2, 128), (0, 2, 128)],
)
def test_blocks(length, bytes_each, size):
    """At most a GiB of logits, in equal blocks, and every row once."""
    made = list(linear_cross_entropy.blocks(length, bytes_each))
    assert [block.start for block in made] == list(range(0, length, size))
    assert [block.stop for block in made] == [min(start + size, length) for start in range(0, length, size)]
    assert size * bytes_each <= linear_cross_entropy.BLOCK_BYTES
