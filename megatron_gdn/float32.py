"""Parameters that stay fp32 when their model is cast to bf16 or fp16."""

import torch
from torch import nn


class Float32Parameters(nn.Module):
    """Mixin: the parameters named in `float32_parameters` ignore dtype casts of the module.

    The host casts a whole model with `module.bfloat16()`. Decay rates lose the difference between
    neighbouring heads in bf16, so these move between devices but keep their dtype and bits.
    """

    float32_parameters: tuple[str, ...] = ()

    def _apply(self, fn, recurse=True):
        kept = [self._parameters[name] for name in self.float32_parameters]
        kept += [p.grad for p in kept if p.grad is not None]

        def without_cast(tensor):
            if not any(tensor is k for k in kept):
                return fn(tensor)
            device = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).device
            moved = "meta" not in (tensor.device.type, device.type)
            return tensor.to(device) if moved else torch.empty_like(tensor, device=device)

        return super()._apply(without_cast, recurse)
