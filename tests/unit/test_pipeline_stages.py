"""Every way to cut a released model into pipeline stages puts each layer, of its own kind, in its place."""

from itertools import chain

import pytest
import torch
from megatron.training.models.gpt import GPTModelConfig

from megatron_gdn.config import SIZES, Qwen35Config
from megatron_gdn.layer_specs import get_qwen35_chunkwise_cp_spec
from tests.helpers.distributed import run_ranks
from tests.helpers.stages import Layer, build_chunks, layers_of, standing_for


def splits(num_layers: int) -> dict[str, dict]:
    """Pipeline settings by name, for a model of so many layers.

    The pattern is three GatedDeltaNet layers, then attention. In the last three splits there is a stage of
    GatedDeltaNet layers only (the first three) and one of a single attention layer (the fourth, the last).
    """
    lonely = f"Ettt|t|t*{num_layers - 5}|tL"
    pp = "pipeline_model_parallel_size"
    return {
        "pp 2": {pp: 2},
        "pp 4": {pp: 4},
        "pp 2, vpp 2": {pp: 2, "virtual_pipeline_model_parallel_size": 2},
        "pp 4, uneven": {
            pp: 4,
            "num_layers_in_first_pipeline_stage": 3,
            "num_layers_in_last_pipeline_stage": 1,
        },
        "pp 4, layout": {pp: 4, "pipeline_model_parallel_layout": lonely},
        "pp 2, vpp 2, layout": {pp: 2, "pipeline_model_parallel_layout": lonely},
    }


def build(rank: int, world_size: int, size: str) -> dict[str, list[list[Layer]]]:
    """Layers of every chunk of a size, in the order in which tokens go through them, for every split."""
    model = SIZES[size]
    few_experts = {"num_moe_experts": 2, "moe_router_topk": 2} if "num_moe_experts" in model.fields else {}
    found = {}
    for name, split in splits(model.fields["num_layers"]).items():
        config = Qwen35Config.from_size(
            size,
            transformer_impl="local",
            perform_initialization=False,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            **few_experts,
            **split,
        )
        whole = GPTModelConfig(
            transformer=config,
            transformer_layer_spec=get_qwen35_chunkwise_cp_spec,
            vocab_size=model.vocab_size,
            share_embeddings_and_output_weights=model.tied,
        )
        stages = config.pipeline_model_parallel_size
        ranks = []
        for stage in range(stages):
            with standing_for(stage, stages, config) as groups:
                ranks.append([layers_of(chunk) for chunk in build_chunks(whole, groups)])
        found[name] = list(chain.from_iterable(zip(*ranks, strict=True)))
    return found


@pytest.mark.parametrize("size", [size for size in SIZES if size != "debug"])
def test_layers_are_in_their_places(size):
    """Numbers run through all stages, every fourth layer is attention, feed-forwards are right."""
    num_layers, is_moe = SIZES[size].fields["num_layers"], "num_moe_experts" in SIZES[size].fields
    wanted = [Layer(number, number % 4 != 0, is_moe) for number in range(1, num_layers + 1)]
    found = run_ranks(build, 1, size)[0]
    lengths = {name: [len(chunk) for chunk in chunks] for name, chunks in found.items()}
    for name, chunks in found.items():
        assert list(chain.from_iterable(chunks)) == wanted, name
    halves, quarters = [num_layers // 2] * 2, [num_layers // 4] * 4
    assert lengths["pp 2"] == halves and lengths["pp 4"] == lengths["pp 2, vpp 2"] == quarters
    rest = (num_layers - 4) // 2
    assert lengths["pp 4, uneven"] == [3, rest, rest, 1]
    assert lengths["pp 4, layout"] == lengths["pp 2, vpp 2, layout"] == [3, 1, num_layers - 5, 1]
