"""What `kernels.matmul` is made of."""
