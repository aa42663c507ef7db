"""Parameters that must stay fp32 do, bit for bit, whatever is done to their model."""

import torch
from torch import nn

from megatron_gdn.norms import Float32RMSNorm
from tests.helpers.cases import GVA_HEADS
from tests.helpers.gdn import config_for


def model() -> nn.Module:
    norm = Float32RMSNorm(config_for(GVA_HEADS["gva1"]), 7)
    norm.weight.data.normal_()
    return nn.Sequential(nn.Linear(7, 7), norm)


def test_cast_keeps_bits_and_grad():
    """bfloat16(), half() and to(dtype) leave the weight and its gradient as they are."""
    net = model()
    weight = net[1].weight
    weight.grad = torch.randn_like(weight)
    bits, grad = weight.detach().clone(), weight.grad.clone()
    for cast in (nn.Module.bfloat16, nn.Module.half, lambda m: m.to(torch.float16)):
        cast(net)
        assert net[0].weight.dtype != torch.float32
        assert torch.equal(net[1].weight, bits) and net[1].weight.dtype == torch.float32
        assert torch.equal(net[1].weight.grad, grad)


def test_moves_between_devices():
    """The weight moves with its model, to the meta device too."""
    net = model().to("meta")
    assert net[1].weight.device.type == "meta" and net[1].weight.dtype == torch.float32
    net = net.to_empty(device="cpu")
    assert net[1].weight.device.type == "cpu"


def test_bf16_input_gives_bf16_output():
    """An fp32 weight does not widen what flows through the layer."""
    net = model().bfloat16()
    assert net(torch.randn(3, 7, dtype=torch.bfloat16)).dtype == torch.bfloat16
