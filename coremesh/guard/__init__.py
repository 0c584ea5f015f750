"""Goldens: what kernels were compiled to and predicted to take, to compare."""
