"""What the grouped products of `kernels` are made of."""
