"""For CUDA devices."""
