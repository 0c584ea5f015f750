"""What `kernels.attention` is made of."""
