"""A checkpoint of the host's own Qwen3.5-shaped model loads into ours and back, and both compute the same.

The host builds such a model with TransformerEngine only. What it would take from there is put together here
from its plain parts, with TransformerEngine's parameter names, so that the layers and keys are the host's.
"""

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import experimental_attention_variant_module_specs as host_specs
from megatron.core.models.gpt import gpt_layer_specs as host_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as HostGatedDeltaNet
from megatron.core.ssm.gated_delta_net import common as host_gdn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_gdn import cpu
from megatron_gdn.config import SIZES
from megatron_gdn.norms import RMSNorm
from tests.helpers.cases import FP32_SHARDED
from tests.helpers.compare import assert_close
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.model import (
    VOCAB,
    logits_of,
    make_model,
    make_samples,
    randomize,
    shards,
    small_fields,
    whole_tensors,
)

FLOAT32 = ("A_log", "dt_bias", "out_norm.weight")
MIXED = {"num_layers": 3, "linear_attention_freq": [1, 0, 1], "moe_layer_freq": [1, 0, 0]}
HOST_FIELDS = {
    name: value for name, value in SIZES["debug"].fields.items() if not name.startswith("rotary_")
} | {"gated_linear_unit": True, "activation_func": nn.functional.silu}


class NormAndLinear(ColumnParallelLinear):
    """Stands for TransformerEngine's fused pair: RMSNorm, then the column-parallel linear."""

    def __init__(self, input_size, output_size, *, config, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))

    def forward(self, x, *inputs, **options):
        """Normalise in fp32 with a zero-centred weight, project."""
        wide = x.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon).rsqrt()
        return super().forward((wide * (1 + self.layer_norm_weight)).to(x.dtype), *inputs, **options)


class Backend(LocalSpecProvider):
    """Stands for the host's TransformerEngine backend."""

    def fuse_layernorm_and_linear(self):
        """As TransformerEngine does."""
        return True

    def column_parallel_layer_norm_linear(self):
        """The fused pair."""
        return NormAndLinear

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
        """The host's own plain norm has no zero-centred weight."""
        return RMSNorm


def host_model(groups, dtype=torch.float32, **overrides) -> GPTModel:
    """The host's model, as `--experimental-attention-variant gated_delta_net` builds it."""
    fields = small_fields(groups) | {"params_dtype": dtype, "transformer_impl": "transformer_engine"}
    config = TransformerConfig(**HOST_FIELDS | fields | overrides)
    host_specs._get_backend_spec_provider = lambda config: Backend()
    host_layer_specs.TESpecProvider = Backend
    spec = host_specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    place = {"position_embedding_type": "rope", "rotary_percent": 0.25, "rotary_base": 10_000}
    model = GPTModel(config, spec, VOCAB, 128, **place, pg_collection=groups)
    model_parallel_cuda_manual_seed(1)
    kinds = [type(layer.self_attention) for layer in model.decoder.layers]
    assert kinds[:2] == [HostGatedDeltaNet, SelfAttention]
    return model


def save(model, folder: Path) -> None:
    cpu.fork_checkpoint_writer()
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state_of(model), str(folder))


def load(model, folder: Path) -> None:
    """Refuses a key that only one side has."""
    state = dist_checkpointing.load(state_of(model), str(folder), strict=StrictHandling.RAISE_ALL)
    model.load_state_dict(state)


def state_of(model) -> dict:
    return model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})


def parts_of(model):
    """A copy of all that this rank holds, by key and place in the whole tensor."""
    return {(shard.key, shard.place): shard.data.clone() for shard in shards(model)}


def save_hosts(rank, world_size, folder, dtype):
    with make_groups(tp=world_size) as groups:
        model = host_model(groups, dtype, **MIXED)
        randomize(model)
        for parameter in model.parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                parameter.data *= 1 + rank  # else every rank's random part is the same
        save(model, folder)
        return parts_of(model)


def load_hosts(rank, world_size, folder, dtype, back):
    """Our parts of a host's checkpoint; saved again at `back`."""
    with make_groups(tp=world_size) as groups:
        model = make_model(groups, "chunkwise", params_dtype=dtype, **MIXED).module
        load(model, folder)
        save(model, back)
        return whole_tensors(model) if world_size == 1 else parts_of(model)


def load_ours(rank, world_size, folder, dtype):
    with make_groups(tp=world_size) as groups:
        model = host_model(groups, dtype, **MIXED)
        load(model, folder)
        return parts_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_of_the_host_loads_and_goes_back(tmp_path, dtype):
    """From the host on 2 tensor-parallel ranks to ours on 2 and 1, and back: same keys, places and bits."""
    hosts = tmp_path / "host"
    saved = run_ranks(save_hosts, 2, hosts, dtype)
    whole = run_ranks(load_hosts, 1, hosts, dtype, tmp_path / "one")[0]
    seen = {key: torch.zeros(tensor.shape, dtype=torch.bool) for key, tensor in whole.items()}
    for (key, place), data in [*saved[0].items(), *saved[1].items()]:
        assert torch.equal(whole[key][place], data.to(whole[key].dtype)), key
        seen[key][place] = True
    assert all(places.all() for places in seen.values())
    assert {tensor.dtype for key, tensor in whole.items() if key.endswith(FLOAT32)} == {torch.float32}

    ours = run_ranks(load_hosts, 2, hosts, dtype, tmp_path / "two")
    back = [run_ranks(load_ours, 2, tmp_path / folder, dtype) for folder in ("one", "two")]
    for rank, want in enumerate(saved):
        for got in (ours[rank], back[0][rank], back[1][rank]):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[part], want[part].to(got[part].dtype)) for part in want), rank
        for part, want_data in want.items():
            assert back[0][rank][part].dtype == back[1][rank][part].dtype == want_data.dtype


def compute_both(rank, world_size, folder):
    """(host's logits, ours) of the same checkpoint."""
    host_gdn.l2norm = lambda x: nn.functional.normalize(x, dim=-1)  # the host's runs on GPUs only
    sample = make_samples("batch_of_2")[0]
    with make_groups() as groups:
        host = host_model(groups, deterministic_mode=True)
        randomize(host)
        save(host, folder)
        with torch.no_grad():
            mask = torch.ones(64, 64, dtype=torch.bool).triu(1)[None, None]
            logits = host(sample["tokens"], sample["position_ids"], mask)
        ours = make_model(groups, "chunkwise")
        load(ours.module, folder)
        return logits, logits_of(ours, groups.cp, sample, packed=False)


def test_outputs_are_the_hosts(tmp_path):
    """The model of a loaded checkpoint computes what the host's does."""
    host, ours = run_ranks(compute_both, 1, tmp_path / "host")[0]
    assert_close("logits", ours, host, FP32_SHARDED)
