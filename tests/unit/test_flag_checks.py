"""Flags that are missing, meaningless or without effect are refused, each with its way out."""

from types import SimpleNamespace

import pytest

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
        ({"mtp_use_repeated_layer": True}, "--mtp-use-repeated-layer is not supported"),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute is not supported"),
        ({"use_rope_scaling": True}, "--use-rope-scaling is not supported"),
        ({"dataloader_type": "external"}, "--dataloader-type external"),
        ({"tokenizer": "byte", "tokenizer_type": "NullTokenizer"}, "--tokenizer-type beside --tokenizer"),
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm .*use RMSNorm"),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant dsa"),
        ({"rampup_batch_size": ["2", "2", "8"]}, "--rampup-batch-size 2 2 8 .*--step-batch-size-schedule"),
        ({"freeze_all_layers": True}, "--freeze-all-layers is not supported"),
        (
            {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et*2|t*2|m|L"},
            r"layout Et\*2\|t\*2\|m\|L: .*put m and L into one stage",
        ),
        (
            {"mtp_num_layers": 2, "pipeline_model_parallel_layout": "E(t|)*2m|mL"},
            "put m and L into one stage",
        ),
        ({"check_for_spiky_loss": True}, "--check-for-spiky-loss is not supported"),
        ({"moe_latent_size": 64}, "--moe-latent-size is not supported"),
        ({"full_validation": True}, "--full-validation is not supported"),
        ({"multiple_validation_sets": True}, "--multiple-validation-sets is not supported"),
    ],
)
def test_check_unsupported(changes, words):
    """What the layers would not obey; several layers of multi-token prediction they do."""
    fine = {"mtp_num_layers": 2, "pipeline_model_parallel_layout": "Et*2|t*2mmL"}
    flag_checks.check_unsupported(Flags(**QWEN35, **fine, tokenizer="byte"))
    with pytest.raises(ValueError, match=words):
        flag_checks.check_unsupported(Flags(**QWEN35 | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, "--num-layers must be at least 1, got 0"),
        ({"linear_attention_freq": 0}, "--linear-attention-freq must be at least 1"),
        ({"num_experts": 8, "tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2 with experts"),
    ],
)
def test_check_positive(changes, words):
    """Sizes that the host divides by, and experts under tensor parallelism."""
    flag_checks.check_positive(Flags(num_experts=8, tensor_model_parallel_size=2, sequence_parallel=True))
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
