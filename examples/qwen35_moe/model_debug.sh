# shellcheck shell=bash disable=SC2034
# Every structure of the MoE sizes in 1.3 million parameters, on bytes; runs anywhere.
MODEL_ARGS=(--qwen35-size debug)
