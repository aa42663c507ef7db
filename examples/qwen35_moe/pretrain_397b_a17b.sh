#!/usr/bin/env bash
# Pretrain Qwen3.5-397B-A17B on streams of 32,768 tokens: 128 GPUs of 80 GB, or any multiple of 128.
# TP x CP and the 8 ranks that share the experts are one node. Of 16 pipeline stages the first, which has the
# embedding, and the last, which has the output layer, hold 2 layers; the others hold 4.
#
#   on every node, with its own NODE_RANK:
#   NNODES=16 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=PREFIX TOKENIZER=FOLDER [MODE=headwise] \
#       examples/qwen35_moe/pretrain_397b_a17b.sh [pretrain flags]
#
# MODE=headwise or MODE=chunkwise; examples/train.sh says what else can be set. The flags win over everything here.
set -euo pipefail
# shellcheck source=examples/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../train.sh"

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 16
    --decoder-first-pipeline-num-layers 2
    --decoder-last-pipeline-num-layers 2
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --context-parallel-size 4
    --cp-comm-type all_gather
    --cp-layout zigzag
    --seq-length 32768
    --global-batch-size 256 # many microbatches, so that pipeline stages seldom wait
    --use-distributed-optimizer
)
pretrain "${MODEL:-397b_a17b}" "${PARALLEL_ARGS[@]}" "$@"
