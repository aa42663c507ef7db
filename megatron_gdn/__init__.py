"""Context-parallel layer specs for Qwen3.5-style hybrid models on a released megatron-core.

Names are imported on first use, so that the command line starts without torch.
"""

from importlib import import_module

_HOMES = {
    "GatedDeltaNet": "gated_delta_net",
    "Qwen35Config": "config",
    "get_qwen35_chunkwise_cp_spec": "layer_specs",
    "get_qwen35_headwise_cp_spec": "layer_specs",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
