"""LoRA adapters: their files, their weights on a rank, and which rows of a step they change."""
