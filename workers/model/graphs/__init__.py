"""Steps recorded as CUDA graphs."""
