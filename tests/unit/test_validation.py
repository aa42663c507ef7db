"""What is refused, what is not, and that each message has the flag and the way out."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_gdn import data_checks, validation


def make_sizes(**changes) -> SimpleNamespace:
    """Sizes that every check accepts, with `changes`."""
    sizes = {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_conv_kernel_dim": 4,
        "cp_comm_type": ["all_gather"],
        "cp_layout": "zigzag",
        "sequence_parallel": False,
    }
    return SimpleNamespace(**sizes | changes)


@pytest.mark.parametrize(
    ("tp", "cp", "keys", "values", "mode"),
    [
        (1, 2, 16, 32, "headwise"),
        (2, 8, 16, 32, "headwise"),
        (1, 32, 16, 32, "headwise"),  # each key head on two ranks
        (4, 8, 16, 32, "headwise"),
        (1, 3, 16, 32, "chunkwise"),
        (2, 64, 2, 4, "chunkwise"),
    ],
)
def test_check_parallel_sizes_accepts_what_can_be_shared(tp, cp, keys, values, mode):
    """Key heads may be replicated; chunkwise asks nothing of cp."""
    validation.check_parallel_sizes(
        make_sizes(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            linear_num_key_heads=keys,
            linear_num_value_heads=values,
        ),
        mode,
    )


@pytest.mark.parametrize(
    ("changes", "mode", "words"),
    [
        ({"context_parallel_size": 64}, "headwise", "value heads .*32.* multiple of 64.*chunkwise"),
        (
            {"context_parallel_size": 4, "linear_num_key_heads": 6, "linear_num_value_heads": 12},
            "headwise",
            "key heads .*6.* multiple or a divisor of 4.*chunkwise",
        ),
        ({"tensor_model_parallel_size": 3}, "chunkwise", "--linear-num-key-heads 16 .*parallel-size 3"),
        ({"cp_comm_type": ["a2a"]}, "chunkwise", "--cp-comm-type a2a .*use all_gather .*or p2p"),
        ({"cp_comm_type": "a2a+p2p"}, "chunkwise", r"--cp-comm-type a2a\+p2p "),
        ({"cp_layout": "striped"}, "chunkwise", "--cp-layout striped .*zigzag or contiguous"),
    ],
)
def test_check_parallel_sizes_refuses(changes, mode, words):
    """Each refusal names the flag, what it got and the way out."""
    with pytest.raises(ValueError, match=words):
        validation.check_parallel_sizes(make_sizes(**changes), mode)


@pytest.mark.parametrize(
    ("changes", "seq_length", "samples", "packed"),
    [
        ({}, 256, 3, False),
        ({"cp_layout": "contiguous"}, 6, 1, False),
        ({}, 6, 2, True),  # 12 tokens together, though 6 would not do
        ({"context_parallel_size": 1}, 7, 1, False),
        ({"sequence_parallel": True, "tensor_model_parallel_size": 2}, 8, 1, False),
    ],
)
def test_check_lengths_accepts(changes, seq_length, samples, packed):
    """Only the stream must divide."""
    validation.check_lengths(
        make_sizes(**changes), seq_length=seq_length, micro_batch_sizes=[samples], packed=packed
    )


@pytest.mark.parametrize(
    ("changes", "seq_length", "words"),
    [
        ({}, 258, "--seq-length.*multiple of 4"),
        ({"cp_layout": "contiguous"}, 257, "--seq-length.*multiple of 2"),
        (
            {"sequence_parallel": True, "tensor_model_parallel_size": 4},
            12,
            "--sequence-parallel needs the 6 tokens .*multiple of 16",
        ),
    ],
)
def test_check_lengths_refuses(changes, seq_length, words):
    """Streams that cannot be cut, shards that tp cannot share."""
    with pytest.raises(ValueError, match=words):
        validation.check_lengths(
            make_sizes(**changes), seq_length=seq_length, micro_batch_sizes=[1], packed=False
        )


def test_check_lengths_asks_for_evaluation_too():
    """The evaluation's micro-batch is a stream as well."""
    with pytest.raises(ValueError, match="stream of 6 tokens"):
        validation.check_lengths(make_sizes(), seq_length=6, micro_batch_sizes=[2, 1], packed=True)


def make_document_flags(masking=False, positions=False, mask=False) -> SimpleNamespace:
    """The three flags of the host about documents."""
    return SimpleNamespace(
        dataloader_inter_document_masking=masking, reset_position_ids=positions, reset_attention_mask=mask
    )


def test_check_documents():
    """A mask that no layer would see is refused, unless documents are kept apart anyway."""
    validation.check_documents(make_document_flags(mask=True, positions=True))
    with pytest.raises(
        ValueError, match="--reset-attention-mask alone .*--dataloader-inter-document-masking"
    ):
        validation.check_documents(make_document_flags(mask=True))


def test_check_data_asks_about_every_prefix():
    """Every prefix is checked with the vocabulary; none at all is refused."""
    seen = []
    data_checks.check_data(["a", "b"], lambda prefix, size: seen.append((prefix, size)), 257, None)
    assert seen == [("a", 257), ("b", 257)]
    with pytest.raises(ValueError, match="--data-path is missing: .*prepare-data"):
        data_checks.check_data([], lambda prefix, size: None, 257, None)


@pytest.mark.parametrize(
    ("split", "documents"), [("969, 30, 1", 600), ("98,2,0", 28), ("1,0,0", 1), ("8,2", 5)]
)
def test_check_data_accepts_splits(split, documents):
    """A share of zero may come to nothing."""
    data_checks.check_data(["a"], lambda prefix, size: documents, 257, split)


@pytest.mark.parametrize(("split", "documents"), [("969, 30, 1", 400), ("99,1,0", 28), ("0,1,99", 40)])
def test_check_data_refuses_shares_of_no_document(split, documents):
    """The host would loop for ever over them."""
    with pytest.raises(
        ValueError, match=f"--split {split}.*none of the {documents} documents.*--data-path a"
    ):
        data_checks.check_data(["a"], lambda prefix, size: documents, 257, split)


@pytest.mark.parametrize(
    ("split", "eval_iters", "num_datasets", "words"),
    [
        ("1,0,0", 2, 1, "--eval-iters 2, but --split 1,0,0"),
        ("100", 2, 1, "--eval-iters 2"),
        ("98,2,0", 0, 2, "--eval-iters 0 with 2 data sets"),
        ("abc", 0, 1, "--split 'abc'"),
    ],
)
def test_check_evaluation(split, eval_iters, num_datasets, words):
    """What the host meets at the first evaluation, or in its loader."""
    data_checks.check_evaluation("98,2,0", 2, 2)
    data_checks.check_evaluation("98,2,0", 0, 1)
    data_checks.check_evaluation("1,0,0", 0, 2)
    data_checks.check_evaluation(None, 2, 2)
    with pytest.raises(ValueError, match=words):
        data_checks.check_evaluation(split, eval_iters, num_datasets)


def make_schedule(**changes) -> SimpleNamespace:
    """Flags of a run that is fine, with `changes`."""
    names = (
        "lr_warmup_samples",
        "lr_decay_iters",
        "lr_decay_samples",
        "train_samples",
        "save",
        "save_interval",
        "lr_warmup_fraction",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
        "phase_transition_iterations",
        "skip_train",
    )
    fine = {"lr_warmup_iters": 2, "train_iters": 10, "lr": 0.1, "lr_warmup_init": 0.0, "min_lr": 0.1}
    return SimpleNamespace(**dict.fromkeys(names) | fine | {"lr_decay_style": "linear"} | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_warmup_iters": 10}, "--lr-warmup-iters 10 .*--train-iters. 10"),
        ({"lr_warmup_iters": 5, "lr_decay_iters": 5}, "--lr-warmup-iters 5 .*--lr-decay-iters"),
        ({"lr_warmup_fraction": 1.5}, "--lr-warmup-fraction 1.5 must be .*below 1"),
        ({"lr_warmup_init": 0.5}, "--lr-warmup-init 0.5 is above --lr 0.1"),
        ({"min_lr": 0.2}, "--min-lr 0.2 is above --lr 0.1"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_samples": 8}, "WSD needs --lr-wsd-decay-iters"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 8, "train_samples": 8, "train_iters": None},
            "WSD needs --lr-wsd-decay-samples",
        ),
        ({"phase_transition_iterations": "2"}, "--phase-transition-iterations needs --train-samples"),
        ({"lr_warmup_samples": 9, "train_samples": 8, "train_iters": None}, "--lr-warmup-samples 9"),
        ({"save": "folder"}, "--save needs --save-interval"),
    ],
)
def test_check_schedule(changes, words):
    """What the host meets with a bare assertion."""
    validation.check_schedule(make_schedule())
    validation.check_schedule(make_schedule(save="folder", save_interval=10))
    validation.check_schedule(make_schedule(lr_decay_style="WSD", lr_wsd_decay_iters=2))
    validation.check_schedule(make_schedule(lr_decay_style="WSD", skip_train=True))
    with pytest.raises(ValueError, match=words):
        validation.check_schedule(make_schedule(**changes))


def test_check_vocabulary():
    """A tokenizer may have fewer ids than the model, not more."""
    data_checks.check_vocabulary("byte", 257, 257)
    with pytest.raises(ValueError, match="--tokenizer byte has 257 .*pass --vocab-size 257"):
        data_checks.check_vocabulary("byte", 257, 256)


def test_check_folder(tmp_path):
    """A folder may be missing; a file in its way is refused, and nothing is made."""
    validation.check_folder("--save", None)
    validation.check_folder("--save", str(tmp_path / "new" / "run"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--save .*file/run cannot be written"):
        validation.check_folder("--save", str(tmp_path / "file" / "run"))


@pytest.fixture
def specs(monkeypatch) -> ModuleType:
    """A module of layer specs in place of ours, so that resolving a name builds nothing."""

    def get_qwen35_some_cp_spec():
        pass

    get_qwen35_some_cp_spec.gdn_cp_mode = "headwise"
    module = ModuleType("megatron_gdn.layer_specs")
    module.get_qwen35_some_cp_spec = get_qwen35_some_cp_spec
    module.get_backend = lambda: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_resolve_spec(specs):
    """A name that resolves gives the function."""
    names = ["megatron_gdn.layer_specs", "get_qwen35_some_cp_spec"]
    assert validation.resolve_spec(names) is specs.get_qwen35_some_cp_spec


@pytest.mark.parametrize(
    "names",
    [
        None,
        ["megatron_gdn.layer_specs"],
        ["megatron_gdn.layer_specs", "get_qwen35_other_spec"],
        ["megatron_gdn.layer_specs", "get_backend"],  # callable, but no spec
        ["megatron_gdn.no_such_module", "get_qwen35_some_cp_spec"],
        ["no_such_package.specs", "get_qwen35_some_cp_spec"],
    ],
)
def test_resolve_spec_refuses_and_lists_the_names(specs, names):
    """Missing and unknown names are answered with those that exist."""
    with pytest.raises(ValueError, match="--spec .*with one of get_qwen35_some_cp_spec"):
        validation.resolve_spec(names)


def test_resolve_spec_lets_a_broken_module_speak(specs, tmp_path, monkeypatch):
    """A module that is there but lacks one of its own imports is not called missing."""
    (tmp_path / "broken_specs.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        validation.resolve_spec(["broken_specs", "get_qwen35_some_cp_spec"])
