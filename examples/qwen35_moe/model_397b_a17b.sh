# shellcheck shell=bash disable=SC2034
# Qwen3.5-397B-A17B: 60 layers, 512 experts, 10 per token; GatedDeltaNet has 16 key and 64 value heads.
MODEL_ARGS=(--qwen35-size 397b-a17b)
