"""What transformers computes: each document of a stream run by itself, in float64, on one CPU.

In fp32 its own rounding is what would be measured: with these models it is as far from float64 as ours is.
"""

from copy import deepcopy
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_gdn.checkpoint.huggingface.jobs import gather
from megatron_gdn.checkpoint.huggingface.table import Rows, Table


class Truth(NamedTuple):
    """One step of a whole model, rounded to fp32."""

    logits: list[Tensor]
    """Per sample, [B, S, vocabulary]."""
    loss: Tensor
    """Mean over all labels that count."""
    grads: dict[str, Tensor]
    """By transformers' name."""
    routes: list[list[Tensor]]
    """Per sample and layer of experts, weight of each expert, [B, S, experts]; 0 if not chosen."""


class _Double(TorchFunctionMode):
    """float64 wherever code asks for fp32, as that of transformers does in norms, softmax and the gated delta
    rule whatever the model's dtype."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            function = Tensor.double
        kwargs = {name: _double(each) for name, each in (kwargs or {}).items()}
        return function(*map(_double, args), **kwargs)


def _double(value):
    return torch.float64 if value is torch.float32 else value


def run_documents(model: nn.Module, samples: list[dict[str, Tensor]], borders: tuple[int, ...]) -> Truth:
    """Run samples, as `tests.helpers.model.make_samples` gives them, forward and backward.

    Args:
        model: of transformers, in fp32; left as it is.
        samples: `tokens`, `labels` [B, S], and `loss_mask` [B, S].
        borders: of the documents in every row.
    """
    model = deepcopy(model).double()
    model.set_experts_implementation("eager")  # the fused one has no float64
    with _Double():
        return _run(model, samples, borders)


def _run(model: nn.Module, samples: list[dict[str, Tensor]], borders: tuple[int, ...]) -> Truth:
    routes = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _, __, output: routes.append(_weights(*output)))
    all_logits, all_routes, total, count = [], [], 0.0, 0
    for sample in samples:
        rows, row_routes = [], []
        for tokens in sample["tokens"]:
            routes.clear()
            documents = [tokens[a:b] for a, b in zip(borders, borders[1:], strict=False) if b > a]
            rows.append(torch.cat([model(each[None], use_cache=False).logits[0] for each in documents]))
            layers = len(routes) // len(documents)
            row_routes.append([torch.cat(routes[layer::layers]) for layer in range(layers)])
        logits = torch.stack(rows)
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), sample["labels"].flatten(), reduction="none"
        )
        total = total + (losses * sample["loss_mask"].flatten()).sum()
        count = count + sample["loss_mask"].sum()
        all_logits.append(_single(logits))
        all_routes.append([_single(torch.stack(layer)) for layer in zip(*row_routes, strict=True)])
    loss = total / count
    loss.backward()
    grads = {name: _single(parameter.grad) for name, parameter in model.named_parameters()}
    return Truth(all_logits, _single(loss), grads, all_routes)


def _single(tensor: Tensor) -> Tensor:
    assert tensor.dtype == torch.float64
    return tensor.detach().type(torch.FloatTensor)


def _weights(logits: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter(1, experts, weights).detach()


def megatron_grads(grads: dict[str, Tensor], table: Table) -> dict[str, Tensor]:
    """The same gradients where Megatron has them, by checkpoint key.

    A zero-centred weight has the gradient of the weight itself.
    """

    def read(rows: Rows) -> Tensor:
        tensor = grads[rows.name]
        flat = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor
        return flat[rows.start : rows.stop]

    found = {}
    for key, shape in table.megatron.items():
        count = prod(shape[:-1]) if len(shape) > 1 else shape[0]
        found[key] = gather(table.to_megatron[key], Rows(key, 0, count), shape, torch.float32, read)
        found[key] = found[key].reshape(shape)
    return found
