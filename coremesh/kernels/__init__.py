"""Kernels that are ready to use; each is a function of arrays.

Call them inside `jax.shard_map` on every device, or outside it on one.
"""
