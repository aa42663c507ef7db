"""One file per operation: the only doors to kernels."""
