"""The same few tokens through transformers and through our model, before and after a conversion.

In fp32 on the CPU, both models whole: it needs memory for 4 bytes per parameter of each, one after the other.
"""

import importlib.util
import json
import logging
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gdn.checkpoint.huggingface.config_json import read_model, text_config
from megatron_gdn.checkpoint.huggingface.torch_dist import Reader, find_checkpoint

_BATCH, _TOKENS = 2, 96
"""More tokens than a chunk of the gated delta rule."""
_BOUND = 1e-3
"""Largest difference of logits that passes, in their standard deviations; fp32 rounds to about 1e-5."""


def check_installed() -> None:
    """Refuse before the conversion what could not be verified after it.

    Raises:
        ValueError: transformers is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "--verify compares with transformers, which is not installed; pip install 'transformers>=5.17'."
        )


def verify(hf: Path, megatron: Path) -> str:
    """Compare the logits of the two sides of a conversion.

    Args:
        hf: Hugging Face checkpoint.
        megatron: the other side; a folder of checkpoints, or one.

    Returns:
        The largest difference and where it is, in a line.

    Raises:
        ValueError: they differ by more than rounding.
    """
    config = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    vocab_size = text_config(config)["vocab_size"]
    tokens = torch.randint(vocab_size, (_BATCH, _TOKENS), generator=torch.Generator().manual_seed(0))
    want = _transformers_logits(hf, config, tokens)
    got = _our_logits(find_checkpoint(megatron), config, tokens)[..., :vocab_size]
    difference = (got - want).abs().nan_to_num(nan=torch.inf)
    row, at, word = (int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    largest, spread = difference.max().item(), want.std().item()
    found = (
        f"largest difference of {want.numel():,} logits {largest:.1e} (their standard deviation is "
        f"{spread:.2g}), at token {at} of sequence {row}, entry {word} of the vocabulary: transformers "
        f"{want[row, at, word]:.6g}, Megatron {got[row, at, word]:.6g}"
    )
    if not largest <= _BOUND * spread:
        raise ValueError(f"--verify: {hf} and {megatron} do not compute the same; {found}.")
    return f"verified without multi-token prediction: {found}"


def _transformers_logits(path: Path, config: dict, tokens: Tensor) -> Tensor:
    """Logits [B, S, vocabulary]."""
    hidden = {name: sys.modules.pop(name, None) for name in ("fla", "causal_conv1d")}
    sys.modules.update(dict.fromkeys(hidden))  # None makes an import fail: their kernels need a GPU
    try:
        import transformers

        kind = getattr(transformers, config["architectures"][0])
        model = kind.from_pretrained(path, dtype=torch.float32).eval()
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def _our_logits(path: Path, config: dict, tokens: Tensor) -> Tensor:
    """Logits [B, S, padded vocabulary] of a model of one rank."""
    from megatron_gdn import cpu

    cpu.enable()
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_gdn.config import Qwen35Config
    from megatron_gdn.layer_specs import get_qwen35_headwise_cp_spec
    from megatron_gdn.microbatch import cut_microbatch
    from megatron_gdn.model import build_model

    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    model = read_model(config)
    padded = Reader(path).tensors["embedding.word_embeddings.weight"].size[0]
    own = {"use_cpu_initialization": True, "perform_initialization": False, "cp_comm_type": "p2p"}
    own |= {"transformer_impl": "local", "gradient_accumulation_fusion": False}
    whole = SimpleNamespace(
        transformer=Qwen35Config.from_model(model, **own),
        transformer_layer_spec=get_qwen35_headwise_cp_spec,
        vocab_size=padded,
        seq_length=_TOKENS,
        fp16_lm_cross_entropy=False,
        parallel_output=False,
        share_embeddings_and_output_weights=model.tied,
    )
    with _one_rank() as groups:
        model_parallel_cuda_manual_seed(1)
        ours = build_model(whole, groups).eval()
        state = ours.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        names = list(state)
        loaded = dist_checkpointing.load(state, str(path))
        ours.load_state_dict({name: loaded[name] for name in names})  # it has the run's arguments too
        sample = {
            "tokens": tokens,
            "labels": tokens,
            "loss_mask": torch.ones(tokens.shape),
            "position_ids": torch.arange(_TOKENS).expand(tokens.shape),
        }
        here = {"layout": "zigzag", "cp_size": 1, "cp_rank": 0, "device": torch.device("cpu")}
        part = cut_microbatch(sample, packed=False, **here)
        with torch.no_grad():
            return ours(part.tokens, part.position_ids, None, packed_seq_params=part.params).float()


@contextmanager
def _one_rank():
    """Process groups of a world of one; the host wants them to exist."""
    from megatron.core import parallel_state  # noqa: TID251  nobody else has made the groups
    from megatron.core.process_groups_config import ProcessGroupCollection

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
