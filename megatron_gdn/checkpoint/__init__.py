"""Checkpoints: what the host's own writer and reader need to be right."""
