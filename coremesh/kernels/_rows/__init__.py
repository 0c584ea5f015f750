"""What kernels of rows and of sums along axes are made of."""
