"""Kernels for GPUs: Triton, and the packages flash-attn and FlashAttention-3."""
