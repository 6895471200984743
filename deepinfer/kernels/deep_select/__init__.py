"""Selection kernels for Hopper GPUs (CUDA C++ through deep_jit)."""
