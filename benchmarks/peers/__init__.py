"""Kernels of others that do what coremesh's do, with settings worth a trial."""
