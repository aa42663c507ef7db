"""Correctness and speed over several GPUs; `__main__` says how to run it."""
