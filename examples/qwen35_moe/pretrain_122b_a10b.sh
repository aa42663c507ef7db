#!/usr/bin/env bash
# Pretrain Qwen3.5-122B-A10B on streams of 32,768 tokens: 32 GPUs of 141 GB, or 64 of 80 GB; any multiple of 32.
# TP x CP and the 8 ranks that share the experts are one node; each of 4 pipeline stages has 12 layers.
#
#   on every node, with its own NODE_RANK:
#   NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=PREFIX TOKENIZER=FOLDER [MODE=headwise] \
#       examples/qwen35_moe/pretrain_122b_a10b.sh [pretrain flags]
#
# MODE=headwise or MODE=chunkwise; examples/train.sh says what else can be set. The flags win over everything here.
set -euo pipefail
# shellcheck source=examples/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../train.sh"

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --context-parallel-size 4
    --cp-comm-type all_gather
    --cp-layout zigzag
    --seq-length 32768
    --global-batch-size 128 # many microbatches, so that pipeline stages seldom wait
    --use-distributed-optimizer
)
pretrain "${MODEL:-122b_a10b}" "${PARALLEL_ARGS[@]}" "$@"
