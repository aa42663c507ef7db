# shellcheck shell=bash disable=SC2034
# Every structure of the dense sizes in half a million parameters, on bytes; runs anywhere.
MODEL_ARGS=(
    --qwen35-size 0.8b
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 256
    --num-attention-heads 4
    --kv-channels 32
    --linear-num-key-heads 2
    --linear-num-value-heads 4
    --linear-key-head-dim 32
    --linear-value-head-dim 32
    --vocab-size 257
)
