"""torch's Adam on its fused kernel: what it computes, and what a checkpoint may say of kernels."""

from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor, nn

from megatron_gdn import optimizer as fused

SHAPES = ((5, 7), (11,), ())


@pytest.fixture
def on_gpu(monkeypatch):
    """As if all parameters were on a GPU."""
    monkeypatch.setattr(fused, "_on_gpu", bool)


@contextmanager
def fused_adam():
    """With fused kernels; the host has its own functions back afterwards."""
    own = {name: getattr(clip_grads, name) for name in ("l2_norm_impl", "multi_tensor_scale_impl")}
    handle = fused.fuse_optimizer_step()
    try:
        yield
    finally:
        handle.remove()
        for name, function in own.items():
            setattr(clip_grads, name, function)


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Steps with gradients that depend on the step only; gives the weights and moments."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        torch.manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    states = [optimizer.state[weight] for weight in weights]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
    return [x.detach().clone() for x in (*weights, *moments)]


def compare(got: list[Tensor], want: list[Tensor]) -> None:
    """To rounding."""
    for each, expected in zip(got, want, strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_computes_what_torch_computes(kind, on_gpu):
    """Several groups, one of them empty, with weight decay: to rounding, and on the fused kernel."""

    def build() -> torch.optim.Optimizer:
        first, *rest = parameters()
        groups = [{"params": [first]}, {"params": rest, "weight_decay": 0.0}, {"params": []}]
        return kind(groups, lr=0.1, weight_decay=0.3)

    want = train(build(), range(4))
    optimizer = build()
    with fused_adam():
        compare(train(optimizer, range(4)), want)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True, None]


def test_goes_on_from_a_state_of_other_kernels(on_gpu):
    """A checkpoint of unfused steps says so in its groups; the run goes on fused all the same."""
    first, truth = torch.optim.AdamW(parameters()), torch.optim.AdamW(parameters())
    train(first, range(2))
    saved = deepcopy(first.state_dict())
    want = train(truth, range(4))
    optimizer = torch.optim.AdamW(parameters())
    for new, old in zip(optimizer.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
        new.data.copy_(old.data)
    optimizer.load_state_dict(saved)
    assert not optimizer.param_groups[0]["fused"]
    with fused_adam():
        compare(train(optimizer, range(2, 4)), want)
    assert optimizer.param_groups[0]["fused"]


def test_clipping_is_the_hosts():
    """Norm and scaling of all gradients, against the host's functions, and in their places."""
    assert clip_grads.l2_norm_impl is local_multi_tensor_l2_norm
    with fused_adam():
        grads = [each.detach() for each in parameters()]
        flag = torch.zeros(1)
        got, _ = clip_grads.l2_norm_impl(0, flag, [grads], False)
        assert got.shape == (1,) and clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm
        torch.testing.assert_close(got, local_multi_tensor_l2_norm(0, flag, [grads], False)[0])
        want = [each * 0.3 for each in grads]
        clip_grads.multi_tensor_scale_impl(0, flag, [grads, grads], 0.3)
        compare(grads, want)


def test_checkpoints_keep_the_step_on_the_cpu(on_gpu, monkeypatch):
    """A checkpoint of a GPU is read where there is none: the shared step is moved before it is stored."""
    monkeypatch.setattr(
        MegatronOptimizer,
        "_extract_common_per_param_step",
        MegatronOptimizer.__dict__["_extract_common_per_param_step"],
    )
    moved = []
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: moved.append(tensor) or tensor.clone())
    with fused_adam():
        step = torch.tensor(3.0)
        got = MegatronOptimizer._extract_common_per_param_step(None, {"state": {0: {"step": step}}})
        assert got == 3 and moved[0] is step
        assert MegatronOptimizer._extract_common_per_param_step(None, {"state": {}}) is None


def test_leaves_others_alone(on_gpu):
    """Other optimizers have no such kernel."""
    optimizer = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    with fused_adam():
        optimizer.step()
    assert not optimizer.param_groups[0].get("fused")


@pytest.mark.gpu(1)
def test_on_a_gpu():
    """The step count follows the weights, also where it was on the CPU."""

    def build() -> torch.optim.Optimizer:
        return torch.optim.AdamW([each.detach().cuda().requires_grad_() for each in parameters()])

    want = train(build(), range(4))
    optimizer = build()
    assert not all(each.is_cuda for each in train(optimizer, range(2)))
    with fused_adam():
        got = train(optimizer, range(2, 4))
    assert all(each.is_cuda for each in got)
    compare(got, [each.cuda() for each in want])
