#!/usr/bin/env bash
# Pretrain on very long sequences with chunkwise context parallelism of GatedDeltaNet: tokens stay where
# they are and the recurrent state is passed on. Two nodes of 8 GPUs, or any multiple of 16 in all.
#
#   on node 0 and, with NODE_RANK=1, on node 1:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=PREFIX TOKENIZER=FOLDER \
#       examples/qwen35_moe/pretrain_chunkwise_cp.sh [pretrain flags]
#
# run.sh beside this file says what else can be set. The flags win over everything here.
set -euo pipefail
# shellcheck source=examples/qwen35_moe/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/run.sh"

SPEC_ARGS=(--spec megatron_gdn.layer_specs get_qwen35_chunkwise_cp_spec)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --context-parallel-size 8
    --cp-comm-type p2p
    --cp-layout zigzag
    --seq-length 131072
    --use-distributed-optimizer
)
pretrain "${SPEC_ARGS[@]}" "${PARALLEL_ARGS[@]}" "$@"
