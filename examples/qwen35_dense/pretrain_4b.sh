#!/usr/bin/env bash
# Pretrain Qwen3.5-4B on streams of 16,384 tokens: one node of 8 GPUs, or any even number in all.
# The model fits one GPU, so the two context-parallel ranks of a stream are all that has to be close.
#
#   DATA_PATH=PREFIX TOKENIZER=FOLDER [MODE=headwise] examples/qwen35_dense/pretrain_4b.sh [pretrain flags]
#
# MODE=headwise or MODE=chunkwise; examples/train.sh says what else can be set. The flags win over everything here.
set -euo pipefail
# shellcheck source=examples/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../train.sh"

PARALLEL_ARGS=(
    --context-parallel-size 2
    --cp-comm-type all_gather
    --cp-layout zigzag
    --seq-length 16384
    --use-distributed-optimizer
)
pretrain "${MODEL:-4b}" "${PARALLEL_ARGS[@]}" "$@"
