"""JAX's own TPU test suites, on the CPU, in coremesh's simulator."""
