"""A Hugging Face checkpoint read straight into a model's parts, whatever its parallel sizes."""

from argparse import Namespace
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor, nn

from megatron_gdn.checkpoint.huggingface.config_json import changed_settings, read_model
from megatron_gdn.checkpoint.huggingface.folder import read_folder
from megatron_gdn.checkpoint.huggingface.table import Rows, Shape
from megatron_gdn.checkpoint.huggingface.to_megatron import Source
from megatron_gdn.config import Model

_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors whose rows are padded, to a number that depends on the run."""


def model_of(path: Path) -> Model:
    """The model that a Hugging Face checkpoint holds, to set flags by.

    Raises:
        ValueError: no such checkpoint, or of a model that our layers are not.
    """
    return read_model(read_folder(path).config)


def source_of(args: Namespace) -> Source:
    """The checkpoint in `args.from_hf`, for `load_weights`; checked and kept the first time."""
    return _source(Path(args.from_hf), not args.mtp_num_layers)


@cache
def _source(path: Path, drop_mtp: bool) -> Source:
    return Source(path, drop_mtp)


def check_source(args: Namespace) -> None:
    """Check a checkpoint, and that the flags describe its model. Reads headers only.

    Args:
        args: Megatron's, as parsed, with `from_hf`, the checkpoint's folder.

    Raises:
        ValueError: a flag says something else than config.json; or what `Source` refuses.
    """
    path = Path(args.from_hf)
    refused = {
        "--pretrained-checkpoint": args.pretrained_checkpoint,
        "--init-model-with-meta-device": args.init_model_with_meta_device,
    }
    for flag, value in refused.items():
        if value:
            raise ValueError(f"{flag} does not go with --from-hf; leave one of them out.")
    for name, got, value in changed_settings(vars(args), model_of(path)):
        raise ValueError(
            f"--{name.replace('_', '-')} is {got}, but {path / 'config.json'} says {value}; leave the flag "
            "out."
        )
    held, wanted = source_of(args).dialect.mtp_layers, args.mtp_num_layers or 0
    if held != wanted:
        raise ValueError(
            f"--mtp-num-layers is {wanted}, but {path} holds {held} layers of multi-token prediction; leave "
            "the flag out."
        )


@torch.no_grad()
def load_weights(model: nn.Module, source: Source) -> None:
    """Fill a model's parameters; each rank reads its own rows of the files. No communication.

    Args:
        model: a pipeline stage as `build_model` makes it, with `pg_collection`; parameters in any dtype, on
            any device.
        source: the checkpoint.

    Raises:
        ValueError: a tensor of the model is not in the checkpoint, or has another shape there.
    """
    state = model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})
    apply_factories(state)  # the host joins some parameters, and a checkpoint has them apart
    parts = [entry for entry in nested_values(state) if isinstance(entry, ShardedTensor)]
    for part in parts:
        _check_shape(part.key, part.global_shape, source)
    filled = 0
    with source.rows(lambda num_bytes: None) as read:
        for part in parts:
            data = part.data.detach().view(part.prepend_axis_num * (1,) + part.local_shape)
            sizes = zip(part.global_offset, data.shape, strict=True)
            place = tuple(slice(start, start + size) for start, size in sizes)
            data.copy_(_read_part(read, part.key, part.global_shape, place))
            filled += data.numel()
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if filled != wanted:
        raise ValueError(f"{source.folder.path} fills {filled:,} of this rank's {wanted:,} parameters.")


def _check_shape(key: str, shape: Shape, source: Source) -> None:
    if key not in source.planned:
        raise ValueError(f"{source.folder.path} has nothing for the model's {key}.")
    want = source.planned[key].shape
    padded = key in _PADDED and shape[0] >= source.model.vocab_size and shape[1:] == want[1:]
    if not padded and tuple(shape) != tuple(want):
        raise ValueError(
            f"{source.folder.path}: {key} is {list(want)} there, and {list(shape)} in the model."
        )


def _read_part(read: Callable[[Rows], Tensor], key: str, shape: Shape, place: tuple[slice, ...]) -> Tensor:
    """A block of a tensor of one to three dimensions, whose rows are counted over all but the last."""
    first, last = place[0], place[-1]
    inner = prod(shape[1:-1])
    if len(shape) == 3 and place[1] != slice(0, shape[1]):
        planes = range(first.start, first.stop)
        cuts = [Rows(key, at * inner + place[1].start, at * inner + place[1].stop) for at in planes]
    else:
        cuts = [Rows(key, first.start * inner, first.stop * inner)]
    block = torch.cat([read(cut) for cut in cuts])
    if len(shape) > 1:
        block = block[:, last]
    return block.reshape([size.stop - size.start for size in place])
