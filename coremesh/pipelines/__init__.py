"""Pipelines inside a kernel: blocks in, compute, blocks out, overlapped."""
