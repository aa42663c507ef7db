# shellcheck shell=bash disable=SC2034
# Qwen3.5-122B-A10B: 48 layers, 256 experts, 8 per token; GatedDeltaNet has 16 key and 64 value heads.
MODEL_ARGS=(--qwen35-size 122b-a10b)
