"""Context-parallel layer specs for Qwen3.5-style hybrid models on a released megatron-core."""
