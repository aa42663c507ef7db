"""Products, sums of rows and SwiGLU of experts against plain fp64; on a GPU their kernels too."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.moe_layer import sort_by_expert
from megatron_gdn.ops.grouped_gemm import grouped_linear
from megatron_gdn.ops.router_logits import router_logits
from megatron_gdn.ops.row_sums import sum_rows
from megatron_gdn.ops.swiglu import weighted_swiglu
from tests.helpers.cases import EXACT, FP32_TRUTH
from tests.helpers.compare import assert_close

BF16 = 4e-3
"""Rounding of a bf16 result, 2^-9 of its size at most, and of the products' operands."""
ROUNDED_ONCE = 1.8e-3
"""2^-9 at most for each number, 2^-9 / sqrt(3) on average; a bf16 upstream gradient would add its own."""
MACHINES = [
    pytest.param(("cpu", torch.float32), id="cpu-fp32"),
    pytest.param(("cpu", torch.bfloat16), id="cpu-bf16"),
    pytest.param(("cuda", torch.float32), id="cuda-fp32", marks=pytest.mark.gpu(1)),
    pytest.param(("cuda", torch.bfloat16), id="cuda-bf16", marks=pytest.mark.gpu(1)),
]


def compare(function, truth, inputs, machine, tolerances=(FP32_TRUTH, BF16)):
    """Output and gradients of the floating inputs, for a random upstream gradient."""
    device, dtype = machine
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    exact = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    mine = [x.to(device).detach().requires_grad_(x.is_floating_point()) for x in inputs]
    want, got = truth(*exact), function(*mine)
    upstream = torch.randn_like(want).to(dtype)
    leaves = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    want_grads = torch.autograd.grad(want, [exact[i] for i in leaves], upstream.double())
    grads = torch.autograd.grad(got, [mine[i] for i in leaves], upstream.to(device))
    tolerance = tolerances[dtype == torch.bfloat16]
    assert_close("output", got, want, tolerance, dtype=dtype)
    for i, grad, want_grad in zip(leaves, grads, want_grads, strict=True):
        assert_close(f"d input {i}", grad, want_grad, tolerance, dtype=dtype)


@pytest.mark.parametrize(
    "counts", ([3, 0, 200, 1, 0], [0, 0, 17, 0, 0], [0, 0, 0, 0, 0], [64, 64, 64, 64, 64])
)
@pytest.mark.parametrize("machine", MACHINES)
def test_grouped_linear(machine, counts):
    """Each expert's own product; experts without tokens, and a rank without any."""

    def loop(x, weight, ends):
        return torch.cat([part @ w.t() for part, w in zip(x.split(counts), weight, strict=True)])

    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    inputs = [torch.randn(sum(counts), 32), torch.randn(len(counts), 48, 32), ends]
    compare(grouped_linear, loop, inputs, machine)


@pytest.mark.gpu(1)
def test_grouped_linear_refuses_unaligned_rows():
    """The GPU's kernel takes rows of 16 bytes."""
    x, weight = torch.randn(4, 32).cuda().bfloat16(), torch.randn(1, 12, 32).cuda().bfloat16()
    with pytest.raises(ValueError, match="--moe-ffn-hidden-size"):
        grouped_linear(x, weight, torch.tensor([4], dtype=torch.int32).cuda())


@pytest.mark.parametrize("shape", ((37, 8, 3, 40), (64, 4, 1, 33), (5, 300, 10, 16)))
@pytest.mark.parametrize("machine", MACHINES)
def test_tokens_to_experts_and_back(machine, shape):
    """Rows are those of a stable sort by expert; sums of rows there and back have the right gradients."""
    num_tokens, num_experts, topk, width = shape
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    chosen = torch.rand(num_tokens, num_experts).topk(topk).indices
    routing_map.scatter_(1, chosen, True)
    token, expert, rows = sort_by_expert(routing_map.to(machine[0]), topk)
    want_expert, want_token = routing_map.t().nonzero().t()
    assert_close("token", token.cpu(), want_token, EXACT)
    assert_close("expert", expert.cpu(), want_expert, EXACT)
    token, rows = token.unsqueeze(1).cpu(), rows.cpu()

    def there(x, token, rows):
        return x[token.squeeze(1)]

    def back(x, rows, token):
        return torch.zeros(num_tokens, width, dtype=x.dtype).index_add(0, token.squeeze(1), x)

    compare(sum_rows, there, [torch.randn(num_tokens, width), token, rows], machine)
    compare(sum_rows, back, [torch.randn(num_tokens * topk, width), rows, token], machine)


@pytest.mark.parametrize("shape", ((37, 48), (1, 8), (0, 16), (19, 512)))
@pytest.mark.parametrize("machine", MACHINES)
def test_weighted_swiglu(machine, shape):
    """With a weight in fp32 whatever the dtype of the tokens, whose gradient is a sum over the width."""
    weight = torch.rand(shape[0], device=machine[0], requires_grad=True)
    exact = weight.detach().cpu().double().requires_grad_()

    def truth(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up * exact.unsqueeze(-1)

    x = torch.randn(shape[0], 2 * shape[1])
    compare(lambda x: weighted_swiglu(x, weight), truth, [x], machine)
    upstream, x = torch.randn(shape).to(machine[1]), x.to(machine[1])
    weighted_swiglu(x.to(machine[0]), weight).backward(upstream.to(machine[0]))
    truth(x.double()).backward(upstream.double())
    assert_close("d weight", weight.grad, exact.grad, FP32_TRUTH, dtype=torch.float32)


@pytest.mark.parametrize("machine", [each for each in MACHINES if each.id.endswith("bf16")])
def test_router_logits(machine):
    """fp32 logits of bf16 tokens are as exact as in fp32; their gradients are rounded to bf16 once."""
    tokens, weight = torch.randn(40, 3, 256).bfloat16(), torch.randn(16, 256).bfloat16()
    mine = [x.to(machine[0]).detach().requires_grad_() for x in (tokens, weight)]
    exact = [x.double().requires_grad_() for x in (tokens, weight)]
    upstream = torch.randn(40, 3, 16)
    got, want = router_logits(*mine), exact[0] @ exact[1].t()
    assert_close("logits", got, want, FP32_TRUTH, dtype=torch.float32)
    got.backward(upstream.to(machine[0]))
    want.backward(upstream.double())
    for name, x, truth in zip(("tokens", "weight"), mine, exact, strict=True):
        assert_close(f"d {name}", x.grad, truth.grad, ROUNDED_ONCE, dtype=torch.bfloat16)
