"""Checkpoints of Hugging Face's transformers, in and out, bit for bit."""
