# shellcheck shell=bash disable=SC2034
# Qwen3.5-35B-A3B: 40 layers, 256 experts, 8 per token; GatedDeltaNet has 16 key and 32 value heads.
MODEL_ARGS=(--qwen35-size 35b-a3b)
