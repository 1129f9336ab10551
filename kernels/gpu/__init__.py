"""Kernels for GPUs: Triton, and the package FlashAttention-3."""
