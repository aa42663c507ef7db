#!/usr/bin/env bash
# Pretrain Qwen3.5-35B-A3B on streams of 32,768 tokens: 8 GPUs of 141 GB, or 16 of 80 GB; any multiple of 8.
# TP x CP is one node, and so are the 8 ranks that share the experts: only gradients leave the node.
#
#   DATA_PATH=PREFIX TOKENIZER=FOLDER [MODE=headwise] examples/qwen35_moe/pretrain_35b_a3b.sh [pretrain flags]
#
# MODE=headwise or MODE=chunkwise; examples/train.sh says what else can be set. The flags win over everything here.
set -euo pipefail
# shellcheck source=examples/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../train.sh"

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --context-parallel-size 4
    --cp-comm-type all_gather
    --cp-layout zigzag
    --seq-length 32768
    --use-distributed-optimizer
)
pretrain "${MODEL:-35b_a3b}" "${PARALLEL_ARGS[@]}" "$@"
