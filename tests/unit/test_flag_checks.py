"""Flags that are missing, meaningless or without effect are refused, each with its way out."""

import argparse
from types import SimpleNamespace

import pytest
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import add_megatron_arguments

from megatron_gdn import flag_checks


class Flags(SimpleNamespace):
    """Flags of which all but those given are unset."""

    def __getattr__(self, name):
        return None


QWEN35 = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "softmax_type": "vanilla",
    "experimental_attention_variant": "gated_delta_net",
    "transformer_impl": "local",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mtp_use_repeated_layer": True}, "--mtp-use-repeated-layer is not Qwen3.5's; leave it out"),
        (
            {"defer_embedding_wgrad_compute": True},
            "--defer-embedding-wgrad-compute does not work with these layers",
        ),
        ({"use_rope_scaling": True}, "--use-rope-scaling is not Qwen3.5's"),
        ({"dataloader_type": "external"}, "--dataloader-type external"),
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm .*use RMSNorm"),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant dsa"),
        ({"rampup_batch_size": ["2", "2", "8"]}, "--rampup-batch-size 2 2 8 .*--step-batch-size-schedule"),
        ({"freeze_all_layers": True}, "--freeze-all-layers is read by megatron-core's own scripts only"),
        (
            {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et*2|t*2|m|L"},
            r"layout Et\*2\|t\*2\|m\|L: .*put m and L into one stage",
        ),
        (
            {"mtp_num_layers": 2, "pipeline_model_parallel_layout": "E(t|)*2m|mL"},
            "put m and L into one stage",
        ),
        ({"check_for_spiky_loss": True}, "--check-for-spiky-loss does not work"),
        ({"hybrid_override_pattern": "M*"}, "--hybrid-override-pattern is not Qwen3.5's"),
        ({"cross_entropy_loss_fusion": True}, "--cross-entropy-loss-fusion does nothing here"),
        ({"attention_backend": AttnBackend.flash}, "--attention-backend flash .*leave it out"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local .*leave it out"),
        ({"fp8": "e4m3"}, "--fp8-format needs TransformerEngine"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap needs TransformerEngine"),
        ({"per_split_data_args_path": "x", "data_path": ["y"]}, "--per-split-data-args-path beside"),
        ({"padded_vocab_size": 128, "vocab_size": 300}, "--padded-vocab-size 128 is below --vocab-size 300"),
        ({"num_experts": 8, "dump_param_to_param_group_map": "x"}, "--dump-param-to-param-group-map cannot"),
        (
            {
                "moe_router_load_balancing_type": "seq_aux_loss",
                "micro_batch_size": 2,
                "reset_position_ids": True,
            },
            "seq_aux_loss with packed documents and --micro-batch-size 2",
        ),
        (
            {"moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": 1e-3},
            "sinkhorn .*is 0.001; add --moe-aux-loss-coeff 0",
        ),
        (
            {
                "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"],
                "moe_aux_loss_coeff": [1e-3, 0.1],
            },
            "sinkhorn .*is 0.1",
        ),
        ({"moe_latent_size": 64}, "--moe-latent-size is not Qwen3.5's"),
        ({"full_validation": True}, "--full-validation fails in megatron-core"),
        ({"multiple_validation_sets": True}, "--multiple-validation-sets fails"),
    ],
)
def test_check_unsupported(changes, words):
    """What the layers would not obey; several layers of multi-token prediction they do."""
    fine = {"mtp_num_layers": 2, "pipeline_model_parallel_layout": "Et*2|t*2mmL", "cuda_graph_impl": "none"}
    fine |= {"moe_router_load_balancing_type": "seq_aux_loss", "micro_batch_size": 2}  # not packed
    fine |= {"attention_backend": AttnBackend.auto, "padded_vocab_size": 384, "vocab_size": 300}
    flag_checks.check_unsupported(Flags(**QWEN35, **fine))
    for kinds, coefficients in ((["sinkhorn"], [0.0]), (["sinkhorn", "aux_loss"], [0.0, 0.1])):
        routing = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": coefficients}
        flag_checks.check_unsupported(Flags(**QWEN35, **routing))
    with pytest.raises(ValueError, match=words):
        flag_checks.check_unsupported(Flags(**QWEN35 | changes))


def test_every_name_is_an_argument_of_the_host():
    """A name that the host does not know would refuse nothing."""
    names = " ".join(flag_checks._REFUSED.values()).split()
    names += (flag_checks._NEEDS_TRANSFORMER_ENGINE + flag_checks._OF_HOST_TOKENIZERS).split()
    flags = {
        action.dest: action.option_strings
        for action in add_megatron_arguments(argparse.ArgumentParser())._actions
    }
    for name in names:
        assert next(flag_checks._given(Flags(**{name: True}), name)) in flags[name]


def test_check_tokenizer():
    """Flags of the host's tokenizers are for runs without --tokenizer."""
    flag_checks.check_tokenizer(Flags(tokenizer="byte"))
    flag_checks.check_tokenizer(Flags(tokenizer_type="NullTokenizer"))
    for name in ("tokenizer_type", "tokenizer_model"):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ValueError, match=f"{flag} beside --tokenizer byte"):
            flag_checks.check_tokenizer(Flags(**{"tokenizer": "byte", name: "x"}))


EXPERTS = {
    "num_experts": 8,
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "world_size": 1,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, "--num-layers must be at least 1, got 0"),
        ({"linear_attention_freq": 0}, "--linear-attention-freq must be at least 1"),
        (
            EXPERTS | {"tensor_model_parallel_size": 2, "world_size": 2},
            "--tensor-model-parallel-size 2 with experts",
        ),
        (
            EXPERTS | {"expert_model_parallel_size": 4},
            "--expert-model-parallel-size 4 .*must divide the number of processes, 1",
        ),
    ],
)
def test_check_positive(changes, words):
    """Sizes that the host divides by, and experts under tensor parallelism."""
    parallel = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}
    flag_checks.check_positive(Flags(**EXPERTS | parallel))
    with pytest.raises(ValueError, match=words):
        flag_checks.check_positive(Flags(**changes))


UNIFORM = {"recompute_method": "uniform", "recompute_num_layers": 2}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "modules moe_act needs"),
        (
            {"recompute_activations": True, "recompute_modules": ["mlp", "layernorm"]},
            "modules layernorm needs",
        ),
        (
            {"recompute_granularity": "full", "recompute_modules": ["mlp"]},
            "modules mlp .*selective.*got full",
        ),
        ({"recompute_modules": ["gdn_norm_out"]}, "modules gdn_norm_out .*selective.*got None"),
        (
            {"recompute_granularity": "full", **UNIFORM, "mtp_num_layers": 1},
            "--recompute-num-layers 2 with multi-token prediction must be 1",
        ),
    ],
)
def test_check_recompute(flags, words, monkeypatch):
    """Modules for which the host needs TransformerEngine, and modules that it would not read."""
    monkeypatch.setattr(flag_checks.importlib.util, "find_spec", lambda name: None)
    flag_checks.check_recompute(Flags(recompute_granularity="full", **UNIFORM))
    flag_checks.check_recompute(
        Flags(recompute_granularity="selective", recompute_modules=["core_attn", "gdn_norm_out", "mlp"])
    )
    with pytest.raises(ValueError, match=words):
        flag_checks.check_recompute(Flags(**flags))


@pytest.mark.parametrize(
    ("optimizer", "installed", "words"),
    [
        ("muon", True, "--optimizer muon with --num-experts 8: .*one tensor"),
        ("dist_muon", True, "--optimizer dist_muon with --num-experts 8"),
        ("lion", False, "--optimizer lion needs the package emerging-optimizers"),
    ],
)
def test_check_optimizer(optimizer, installed, words, monkeypatch):
    """Those that see matrices only would leave experts to Adam without a word."""
    monkeypatch.setattr(flag_checks.importlib.util, "find_spec", lambda name: installed or None)
    flag_checks.check_optimizer(Flags(optimizer="adam", num_experts=8))
    if installed:
        flag_checks.check_optimizer(Flags(optimizer="muon", transformer_impl="local"))
        flag_checks.check_optimizer(Flags(optimizer="lion", num_experts=8))
    with pytest.raises(ValueError, match=words):
        flag_checks.check_optimizer(Flags(optimizer=optimizer, num_experts=8, transformer_impl="local"))


def test_check_required_names_every_missing_flag():
    """One line for all of them."""
    args = SimpleNamespace(
        seq_length=None, micro_batch_size=1, lr=None, train_iters=None, train_samples=None, skip_train=False
    )
    with pytest.raises(ValueError, match=r"--seq-length, --lr, --train-iters \(or --train-samples\) missing"):
        flag_checks.check_required(args)
