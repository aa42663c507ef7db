"""Runs of pretrain_qwen35.py on real text: context parallel against one rank, saved and resumed, bf16."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.helpers.pretrain import TINY, arguments, losses, pretrain

SPEC = "megatron_gdn.layer_specs get_qwen35_{}_cp_spec"
HALFWAY = TINY["train-iters"] // 2
# fp32; rounding has not been amplified yet in so few iterations.
TOLERANCE = 1e-5
FLOAT32 = ("A_log", "dt_bias", "out_norm.weight")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Run once and keep: (mode, cp) -> the folder of its checkpoints and log."""
    folders = {}

    def get(mode: str, cp: int) -> Path:
        if (mode, cp) not in folders:
            root = tmp_path_factory.mktemp(f"{mode}-cp{cp}")
            train(data, root, mode, cp)
            folders[mode, cp] = root / "save"
        return folders[mode, cp]

    return get


def train(data: str, root: Path, mode: str, cp: int, **flags) -> dict[int, float]:
    """Train packed documents; the losses that the log in `root`/save tells of."""
    flags = {name.replace("_", "-"): value for name, value in flags.items()}
    own = {
        "spec": SPEC.format(mode),
        "context-parallel-size": cp,
        "data-path": data,
        "dataloader-inter-document-masking": True,
        "save": root / "save",
        "save-interval": HALFWAY,
    }
    pretrain(cp, arguments(own | flags), root / "output")
    return losses(root / "save")


def assert_same(found: dict[int, float], wanted: dict[int, float]) -> None:
    """The same iterations with the same losses, to rounding."""
    assert found == pytest.approx(wanted, rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_two_ranks_train_like_one(run, mode):
    found, wanted = losses(run(mode, 2)), losses(run("headwise", 1))
    assert sorted(wanted) == list(range(1, TINY["train-iters"] + 1))
    assert wanted[TINY["train-iters"]] < wanted[1] - 0.5  # it learns, so later losses say something
    assert_same(found, wanted)


def test_run_leaves_checkpoint_log_and_picture(run):
    folder = run("chunkwise", 2)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(TINY["train-iters"])
    assert {p.name for p in folder.glob("iter_*")} == {
        f"iter_{i:07d}" for i in (HALFWAY, TINY["train-iters"])
    }
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    said = "".join(p.read_text() for p in (folder.parent / "output").iterdir())
    assert f"step {TINY['train-iters']} of {TINY['train-iters']} | loss" in said
    assert "get_qwen35_chunkwise_cp_spec" in said


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [(("headwise", 1), ("chunkwise", 2)), (("headwise", 2), ("headwise", 1))],
    ids=["1 to 2", "2 to 1"],
)
def test_resume_at_another_size(run, data, tmp_path, saved, resumed):
    mode, cp = resumed
    found = train(data, tmp_path, mode, cp, load=run(*saved), ckpt_step=HALFWAY)
    wanted = {i: loss for i, loss in losses(run(*saved)).items() if i > HALFWAY}
    assert_same(found, wanted)


def test_recompute_changes_nothing(run, data, tmp_path):
    """Core attention and the gated norm computed again in backward, on two ranks."""
    flags = {"recompute_granularity": "selective", "recompute_modules": "core_attn gdn_norm_out"}
    assert_same(train(data, tmp_path, "chunkwise", 2, **flags), losses(run("headwise", 1)))


def test_parameters_are_whole_when_they_are_read(data, tmp_path):
    """Gathered while earlier layers run, in buckets with borders inside layers: nothing is read too early.

    A learning rate at which the weights of the step before give another loss.
    """
    # The host cannot save an optimizer whose buckets are as small as these.
    flags = {"use_distributed_optimizer": True, "lr": 1e-2, "no_save_optim": True}
    overlap = flags | {"overlap_grad_reduce": True, "overlap_param_gather": True}
    wanted = train(data, tmp_path / "together", "chunkwise", 2, **flags)
    for size in (1, 18_000):
        found = train(data, tmp_path / str(size), "chunkwise", 2, **overlap, ddp_bucket_size=size)
        assert_same(found, wanted)


def test_nan_is_named_where_nothing_is_saved(data, tmp_path):
    """The error says what happened, and not that there is no folder to save to."""
    flags = {"data-path": data, "lr": 1e30, "dataloader-inter-document-masking": True}
    with pytest.raises(AssertionError, match="NaN|nan") as error:
        pretrain(1, arguments(flags), tmp_path / "output")
    assert str(error.value).strip().splitlines()[-1].startswith("RuntimeError"), error.value


def test_bf16_keeps_float32_parameters(data, tmp_path):
    found = train(data, tmp_path, "chunkwise", 2, bf16=True, train_iters=2)
    assert found[2] < 6.5
    dtypes = checkpoint_dtypes(tmp_path / "save" / "iter_0000002")
    for name in FLOAT32:
        kept = {key: dtype for key, dtype in dtypes.items() if key.endswith(name)}
        assert kept and set(kept.values()) == {torch.float32}, kept
    rest = {key: dtype for key, dtype in dtypes.items() if not key.endswith(FLOAT32)}
    assert any(key.endswith("in_proj.weight.query") for key in rest)
    assert set(rest.values()) == {torch.bfloat16}, rest


def checkpoint_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Parameter -> dtype, of the model's part of a checkpoint."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    properties = {key: getattr(entry, "properties", None) for key, entry in entries.items()}
    return {
        key: each.dtype
        for key, each in properties.items()
        if each and key.startswith(("decoder.", "embedding.", "output_layer."))
    }
