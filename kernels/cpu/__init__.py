"""Kernels for CPUs: C++ that is compiled on first use, oneDNN's products, and the choice between them."""
