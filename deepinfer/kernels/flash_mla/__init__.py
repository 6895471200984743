"""Token-level sparse attention for Hopper GPUs (CUDA C++ through deep_jit)."""
