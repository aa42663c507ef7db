#!/usr/bin/env bash
# Pretrain with headwise context parallelism of GatedDeltaNet: heads are shared out by all-to-all.
# One node of 8 GPUs, or any multiple of 8 in all.
#
#   DATA_PATH=PREFIX TOKENIZER=FOLDER examples/qwen35_moe/pretrain_headwise_cp.sh [pretrain flags]
#
# run.sh beside this file says what else can be set. The flags win over everything here.
set -euo pipefail
# shellcheck source=examples/qwen35_moe/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/run.sh"

SPEC_ARGS=(--spec megatron_gdn.layer_specs get_qwen35_headwise_cp_spec)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
    --context-parallel-size 4 # must divide the value heads of a tensor-parallel rank
    --cp-comm-type all_gather
    --cp-layout zigzag
    --seq-length 32768
    --use-distributed-optimizer
)
pretrain "${SPEC_ARGS[@]}" "${PARALLEL_ARGS[@]}" "$@"
