"""What we lean on in megatron-core 0.19.2, and what our layers owe it."""

import inspect
import subprocess
import sys

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as HostGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, import_module

import megatron_gdn
from megatron_gdn.layer_specs import LocalBackend, _attention_spec, _gated_delta_net_spec
from megatron_gdn.norms import RMSNorm
from tests.helpers.cases import GVA_HEADS
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.gdn import config_for


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.state_dict().items() if isinstance(p, torch.Tensor)}


def compare_state_dicts(rank, world_size):
    """(host's, ours) per layer type, as dictionaries of shapes."""
    with make_groups() as groups:
        config, backend = config_for(GVA_HEADS["gva2"]), LocalSpecProvider()
        host_gdn = ModuleSpec(
            HostGatedDeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=backend.column_parallel_linear(),
                out_norm=RMSNorm,
                out_proj=backend.row_parallel_linear(),
            ),
        )
        build = {"config": config, "layer_number": 1, "pg_collection": groups}
        pairs = [(host_gdn(**build), _gated_delta_net_spec(LocalBackend(), "chunkwise")(**build))]
        ours = _attention_spec(LocalBackend())
        pairs.append((ModuleSpec(SelfAttention, ours.params, ours.submodules)(**build), ours(**build)))
        return [(shapes(host), shapes(mine)) for host, mine in pairs]


def test_parameters_are_the_hosts():
    """Same names and shapes as the host's own GatedDeltaNet and SelfAttention."""
    for host, ours in run_ranks(compare_state_dicts, 1)[0]:
        assert host == ours and host


def test_layer_passes_what_our_modules_take():
    """TransformerLayer builds its mixer with these keywords; the bare module would hide a missing one."""
    for module in (megatron_gdn.GatedDeltaNet, SelfAttention):
        parameters = inspect.signature(module.__init__).parameters
        for name in ("config", "layer_number", "pg_collection", "cp_comm_type", "pp_layer_offset", "name"):
            assert name in parameters, (module, name)


def test_host_resolves_our_specs_and_swallows_a_typo():
    """`--spec` names resolve; a wrong module gives None, which the training script has to refuse."""
    assert (
        import_module(("megatron_gdn.layer_specs", "get_qwen35_headwise_cp_spec")).gdn_cp_mode == "headwise"
    )
    assert import_module(("megatron_gdn.layer_spec", "get_qwen35_headwise_cp_spec")) is None


def test_spec_refuses_another_norm():
    """The local backend has RMSNorm only, so a config that names another is not trained with it."""
    config = config_for(GVA_HEADS["gva2"], normalization="LayerNorm")
    with pytest.raises(ValueError, match="--normalization RMSNorm"):
        megatron_gdn.get_qwen35_headwise_cp_spec(config)


def test_fla_swallows_unknown_keywords():
    """Why our door passes only what the signature names; if fla ever refuses them, this may go."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    parameters = inspect.signature(inspect.unwrap(chunk_gated_delta_rule)).parameters
    assert any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    used = {
        "q",
        "k",
        "v",
        "g",
        "beta",
        "initial_state",
        "output_final_state",
        "use_qk_l2norm_in_kernel",
        "cu_seqlens",
        "cu_seqlens_cpu",
    }
    assert used <= set(parameters)


def test_public_names():
    """The stable interface, and nothing heavy on import."""
    for name in megatron_gdn.__all__:
        assert getattr(megatron_gdn, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'GatedDeltaNets'"):
        _ = megatron_gdn.GatedDeltaNets
    quick = "import sys, megatron_gdn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", quick], timeout=60).returncode == 0
