"""Fused kernels of a decode step in CUDA C++."""
