"""The training script with multi-token prediction: the same run on one rank and on several."""

import re
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_gdn.training_log import LOG_NAME, read_log
from tests.helpers.pretrain import pretrain, words

FLAGS = {
    "qwen35-size": "0.8b",  # the output layer shares the embedding's weight
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 64,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "kv-channels": 16,
    "linear-attention-freq": 2,
    "linear-key-head-dim": 16,
    "linear-value-head-dim": 16,
    "linear-num-key-heads": 2,
    "linear-num-value-heads": 4,
    "vocab-size": 257,
    "mtp-num-layers": 1,
    "tokenizer": "byte",
    "split": "100,0,0",
    "seq-length": 64,
    "micro-batch-size": 2,
    "global-batch-size": 4,
    "lr-warmup-iters": 0,
    "lr-decay-iters": 3,
    "log-interval": 1,
    "eval-iters": 0,
    "eval-interval": 1000,
    "num-workers": 0,
    "spec": "megatron_gdn.layer_specs get_qwen35_chunkwise_cp_spec",
}
SWITCHES = ("--dataloader-inter-document-masking", "--no-save-optim", "--no-save-rng")


def make_data(folder: Path) -> str:
    """Documents of 1 to 40 bytes, each ended by the tokenizer's end-of-document token; the prefix."""
    prefix, random = str(folder / "documents"), numpy.random.default_rng(3)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(257))
    for length in random.integers(1, 40, 60):
        builder.add_document(numpy.append(random.integers(97, 123, length), 256), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return prefix


def run_training(folder: Path, ranks: int, flags: dict, *switches: str) -> dict[str, list[float]]:
    """Every iteration's losses and gradient norm, of the script on `ranks` ranks."""
    line = words(FLAGS | flags | {"tensorboard-dir": folder})
    pretrain(ranks, [*line, *SWITCHES, *switches], folder)
    printed = (folder / f"rank-{ranks - 1}.txt").read_text()
    records = read_log(str(folder / LOG_NAME))
    return {
        "mtp_1 loss": [float(value) for value in re.findall(r"mtp_1 loss: (\S+)", printed)],
        "lm loss": [record["lm loss"] for record in records],
        "grad norm": [record["grad norm"] for record in records],
    }


def test_training_script_with_mtp_on_several_ranks(tmp_path):
    """Three iterations on packed documents: the same losses and gradient norms, whatever the sizes.

    The two ranks of a context-parallel group are no neighbours when there is tensor parallelism. The last
    of two pipeline stages has a copy of the embedding, in training and in the checkpoint.
    """
    import pretrain_qwen35  # noqa: F401  (once, before ranks are forked)

    data = {"data-path": make_data(tmp_path)}
    start = data | {"train-iters": 1, "save": tmp_path / "save", "save-interval": 1}
    start |= {"lr": 0, "min-lr": 0, "weight-decay": 0}
    run_training(tmp_path / "save", 1, start)
    loaded = data | {"train-iters": 3, "load": tmp_path / "save", "lr": 1e-3}
    switches = ("--finetune", "--exit-on-missing-checkpoint")
    want = run_training(tmp_path / "one", 1, loaded, *switches)
    assert len(want["mtp_1 loss"]) == 3 and want["mtp_1 loss"][0] > 4
    cases = {
        "cp": {"context-parallel-size": 2},
        "pp": {"pipeline-model-parallel-size": 2},
        "tp-cp": {"tensor-model-parallel-size": 2, "context-parallel-size": 2, "cp-layout": "contiguous"},
    }
    for name, sizes in cases.items():
        ranks = 4 if name == "tp-cp" else 2
        parallel = ("--sequence-parallel",) if name == "tp-cp" else ()
        got = run_training(tmp_path / name, ranks, loaded | sizes, *switches, *parallel)
        for value, tolerance in (("mtp_1 loss", 1e-5), ("lm loss", 1e-5), ("grad norm", 1e-4)):
            assert got[value] == pytest.approx(want[value], rel=tolerance), (name, value)
