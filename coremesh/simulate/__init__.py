"""Runs the kernels of every core of every chip on the CPU, checked."""
