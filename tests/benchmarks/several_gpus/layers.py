"""The modules that are measured, and one training step of each: forward and backward, no optimizer."""

import gc
from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as HostGatedDeltaNet
from megatron.core.ssm.gated_delta_net import common
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from megatron_gdn.config import Qwen35Config
from megatron_gdn.layer_specs import LocalBackend, _attention_spec, _gated_delta_net_spec
from megatron_gdn.norms import RMSNorm
from megatron_gdn.stream import StreamParams, StreamPlan
from tests.benchmarks.several_gpus.cases import ATTENTION, HOST, SLICE, Work
from tests.helpers.reference import l2_normalise

Step = Callable[[], None]
LAYOUT = "zigzag"
"""The host's GatedDeltaNet knows no other, and attention is balanced in it."""


def make_step(work: Work, size: str, groups, tokens: int, *, document: int = 0, recompute=True) -> Step:
    """Build the module of `work` and data for it.

    Args:
        work: which module.
        size: released size whose layers it has.
        groups: process groups; the stream is cut for `cp`.
        tokens: of the stream, over all ranks.
        document: tokens per document; 0: one document.
        recompute: full recomputation, in 4 layers; single layers are never recomputed.

    Returns:
        One training step: afterwards the parameters and the input hold gradients.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    cp, rank = groups.cp.size(), groups.cp.rank()
    config = _config(work, size, cp, recompute)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    module = _build(work, config, groups).to(device, torch.bfloat16)
    borders = (0, tokens)
    if document:
        borders = (*range(0, tokens, document), tokens)
    plan = StreamPlan(LAYOUT, cp, rank, tokens, 1, borders, torch.device(device))
    params = StreamParams(qkv_format="thd" if plan.packed else "sbhd", plan=plan)
    shape = (tokens // cp, 1, config.hidden_size)
    hidden = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(shape, device=device, dtype=torch.bfloat16)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones((), device=device))

    def step() -> None:
        hidden.grad = None  # those of the parameters add up, as over the microbatches of training
        out = module(hidden, None, packed_seq_params=params)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(upstream)

    step.module = module
    return step


def free() -> None:
    """Give memory back, and start a new count of its peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _config(work: Work, size: str, cp: int, recompute: bool) -> Qwen35Config:
    on_cpu = not torch.cuda.is_available()
    settings = {
        "num_layers": 4,
        "context_parallel_size": cp,
        "cp_comm_type": work.way if work.module == ATTENTION else "p2p",
        "cp_layout": LAYOUT,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "transformer_impl": "local",
        "use_cpu_initialization": on_cpu,
        "gdn_backend": "torch" if on_cpu else work.backend or "auto",
    }
    if work.module == SLICE and recompute:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if work.way == HOST and on_cpu:
        # Its other paths are GPU kernels; so is the norm that it calls in this one too.
        settings["deterministic_mode"] = True
        common.l2norm = l2_normalise
    return Qwen35Config.from_size(size, **settings)


def _build(work: Work, config: Qwen35Config, groups) -> nn.Module:
    if work.module == SLICE:
        spec = import_module(("megatron_gdn.layer_specs", f"get_qwen35_{work.way}_cp_spec"))
        return TransformerBlock(config, spec(config), pg_collection=groups)
    place = {"config": config, "layer_number": 1, "pg_collection": groups}
    if work.module == ATTENTION:
        return _attention_spec(LocalBackend())(**place, cp_comm_type=work.way)
    if work.way == HOST:
        ours = _gated_delta_net_spec(LocalBackend(), "headwise").submodules
        ours.out_norm = RMSNorm
        return ModuleSpec(HostGatedDeltaNet, submodules=ours)(**place)
    return _gated_delta_net_spec(LocalBackend(), work.way)(**place)
