# shellcheck shell=bash disable=SC2034
# Qwen3.5-4B: 32 layers, hidden size 2560, tied embeddings; GatedDeltaNet has 16 key and 32 value heads.
MODEL_ARGS=(--qwen35-size 4b)
