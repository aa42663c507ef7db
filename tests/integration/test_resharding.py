"""Training that stops, changes every parallel size and the GDN mode, and goes on.

Every run is `pretrain_qwen35.py` with its ranks forked from here. A run that loads a checkpoint at once saves
what it has loaded; the two checkpoints are read with torch's own reader, which knows whole tensors only.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import megatron_gdn.layer_specs  # noqa: F401  imported once, before ranks are forked
from megatron_gdn.training_log import LOG_NAME, read_log
from tests.helpers.distributed import run_ranks
from tests.helpers.pretrain import train_and_resave, words

FLAGS = {
    "qwen35-size": "debug",
    "hidden-size": 64,
    "linear-num-key-heads": 4,
    "linear-num-value-heads": 8,
    "tokenizer": "byte",
    "seq-length": 32,
    "micro-batch-size": 1,
    "global-batch-size": 4,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-decay-iters": 20,
    "lr-warmup-iters": 2,
    "weight-decay": 0.1,
    "clip-grad": 1.0,
    "cp-comm-type": "all_gather",
    "log-interval": 1,
    "eval-iters": 0,
    "eval-interval": 1000,
    "save-interval": 1000,
    "num-workers": 0,
}
RESHARDABLE = ("use-distributed-optimizer", "dist-ckpt-optim-fully-reshardable")
SP = (*RESHARDABLE, "sequence-parallel")
FLOAT32 = ("A_log", "dt_bias", "out_norm.weight")
CLOSE = 1e-5
"""Largest relative difference of a loss, fp32: sums in another order."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    folder: Path
    losses: list[float]
    dtypes: dict[str, set[torch.dtype]]
    """Of every parameter and of its gradient's buffer, by its name in the first rank."""

    @cached_property
    def loaded(self) -> dict[str, Tensor]:
        """What it saved at once after loading."""
        return read_checkpoint(self.folder / "loaded")

    @cached_property
    def saved(self) -> dict[str, Tensor]:
        """Its last checkpoint."""
        return read_checkpoint(self.folder / "save")


def train(folder: Path, ranks: int, mode: str, switches: tuple[str, ...], **flags) -> Run:
    """Train in `ranks` processes; `flags` win over FLAGS. Saves at the end."""
    folder.mkdir(parents=True)
    settings = FLAGS | {name.replace("_", "-"): value for name, value in flags.items()}
    settings |= {"spec": f"megatron_gdn.layer_specs get_qwen35_{mode}_cp_spec", "save": folder / "save"}
    settings |= dict.fromkeys(("mock-data", "use-checkpoint-opt-param-scheduler", *switches), True)
    line = words(settings)
    try:
        dtypes = run_ranks(train_and_resave, ranks, line, folder, timeout=200)[0]
    except AssertionError as error:
        raise AssertionError(f"pretrain_qwen35.py {' '.join(line)}\n{error}") from None
    losses = [record["lm loss"] for record in read_log(str(folder / "save" / LOG_NAME))]
    return Run(folder, losses, dtypes)


def read_checkpoint(folder: Path, iteration: int | None = None) -> dict[str, Tensor]:
    """Every whole tensor of a checkpoint in `folder`, the last one if not told, by its key."""
    pattern = "iter_*" if iteration is None else f"iter_{iteration:07d}"
    reader = dcp.FileSystemReader(sorted(folder.glob(pattern))[-1])
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Same keys, shapes, dtypes and bits."""
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype, key
        assert torch.equal(got[key], tensor), key


def assert_close(losses: list[float], want: list[float]) -> None:
    """As many losses, and within rounding."""
    assert len(losses) > 0
    assert losses == pytest.approx(want, rel=CLOSE)


TP2 = {"tensor_model_parallel_size": 2}
TP2_CP2 = TP2 | {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
STAGES = [
    # After TP2 CP2 in headwise mode one iteration each: name, ranks, mode, switches, sizes.
    ("tp1-cp4", 4, "chunkwise", RESHARDABLE, {"context_parallel_size": 4}),
    ("tp4-cp1", 4, "chunkwise", SP, {"tensor_model_parallel_size": 4}),
    ("pp2-ep2", 4, "headwise", RESHARDABLE, PP2 | {"expert_model_parallel_size": 2}),
    ("pp2-vpp2", 2, "chunkwise", RESHARDABLE, PP2 | {"num_layers_per_virtual_pipeline_stage": 1}),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Run:
    """Six iterations at TP2 CP2, with a checkpoint after every second."""
    folder = tmp_path_factory.mktemp("resharding") / "uninterrupted"
    return train(folder, 4, "headwise", SP, train_iters=6, save_interval=2, **TP2_CP2)


@pytest.fixture(scope="module")
def uninterrupted_bf16(tmp_path_factory) -> Run:
    """Four iterations at TP2 DP2 in bf16, with a checkpoint after two."""
    folder = tmp_path_factory.mktemp("resharding") / "uninterrupted"
    return train(folder, 4, "headwise", (*SP, "bf16"), train_iters=4, save_interval=2, **TP2)


def after_two(run: Run) -> dict:
    """Flags to go on from its checkpoint after two iterations."""
    return {"load": run.folder / "save", "ckpt_step": 2}


def test_resume_at_other_sizes(uninterrupted, tmp_path):
    """TP2 CP2 -> TP1 CP4 -> TP4 -> PP2 EP2 -> PP2 VPP2, both modes: states move bit for bit, losses go on."""
    saved, flags = read_checkpoint(uninterrupted.folder / "save", 2), after_two(uninterrupted)
    for done, (name, ranks, mode, switches, sizes) in enumerate(STAGES, 2):
        run = train(tmp_path / name, ranks, mode, switches, train_iters=done + 1, **flags, **sizes)
        assert_equal(run.loaded, saved)
        assert_close(run.losses, uninterrupted.losses[done : done + 1])
        saved, flags = run.saved, {"load": run.folder / "save"}


def test_resume_at_the_same_sizes_and_async_save(uninterrupted, tmp_path):
    """Losses and states are those of the uninterrupted run, bit for bit; what is saved asynchronously too."""
    switches = (*SP, "async-save")
    flags = after_two(uninterrupted) | {"train_iters": 4} | TP2_CP2
    run = train(tmp_path / "resumed", 4, "headwise", switches, **flags)
    assert run.losses == uninterrupted.losses[2:4]
    assert_equal(run.saved, read_checkpoint(uninterrupted.folder / "save", 4))


def test_resume_in_bf16(uninterrupted_bf16, tmp_path):
    """In bf16 a resumed run is exact, and states move to CP4 bit for bit; gates and out_norm stay fp32."""
    flags = after_two(uninterrupted_bf16) | {"train_iters": 4}
    same = train(tmp_path / "same", 4, "headwise", (*SP, "bf16"), **flags, **TP2)
    assert same.losses == uninterrupted_bf16.losses[2:]
    assert_equal(same.saved, uninterrupted_bf16.saved)

    other = train(
        tmp_path / "other", 4, "chunkwise", (*RESHARDABLE, "bf16"), **flags, context_parallel_size=4
    )
    assert_equal(other.loaded, read_checkpoint(uninterrupted_bf16.folder / "save", 2))

    assert len(same.dtypes) > 50
    for name, dtypes in same.dtypes.items():
        model_dtype = torch.float32 if name.endswith(FLOAT32) else torch.bfloat16
        assert dtypes == {model_dtype, torch.float32}, name  # the host sums gradients in fp32
    states = {key: tensor for key, tensor in same.saved.items() if key.startswith("optimizer.")}
    assert {tensor.dtype for tensor in states.values()} == {torch.float32}
    for key in same.saved.keys() - states.keys():
        want = torch.float32 if key.endswith(FLOAT32) else torch.bfloat16
        assert same.saved[key].dtype == want, key
        main = states[f"optimizer.state.param.{key}"]
        assert torch.equal(main.to(want), same.saved[key]), key
        assert key.endswith(FLOAT32) or not torch.equal(main, same.saved[key].float()), key


def test_optimizer_that_is_not_distributed(tmp_path):
    """In bf16, TP2 -> EP2 without the distributed optimizer: states move bit for bit."""
    first = train(tmp_path / "tp2", 2, "headwise", ("bf16", "sequence-parallel"), train_iters=2, **TP2)
    sizes = {"load": first.folder / "save", "expert_model_parallel_size": 2}
    other = train(tmp_path / "ep2", 2, "headwise", ("bf16",), train_iters=3, **sizes)
    assert_equal(other.loaded, first.saved)
    assert len(other.losses) == 1


LAYER = {
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_experts.gate_weight",
}
GDN = {
    "self_attention.A_log",
    "self_attention.dt_bias",
    *(f"self_attention.conv1d.weight.{part}" for part in ("query", "key", "value")),
    *(f"self_attention.in_proj.weight.{part}" for part in ("query", "key", "value", "z", "beta", "alpha")),
    "self_attention.in_proj.layer_norm_weight",
    "self_attention.out_norm.weight",
    "self_attention.out_proj.weight",
}
ATTENTION = {
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_proj.weight",
}
"""What the host's own layers store, whose norms are part of the linears that follow (TransformerEngine)."""


def test_keys_are_the_hosts(uninterrupted):
    """A checkpoint has the keys that the host's Qwen3.5-shaped model stores, and one state per parameter."""
    keys = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
    for layer, mixer in enumerate((GDN, GDN, GDN, ATTENTION)):
        keys |= {f"decoder.layers.{layer}.{name}" for name in LAYER | mixer}
    states = {f"optimizer.state.{kind}.{key}" for kind in ("param", "exp_avg", "exp_avg_sq") for key in keys}
    assert uninterrupted.saved.keys() == keys | states
