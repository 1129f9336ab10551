"""How long a step may take: when tokens are due, how large a chunk fits, and when a prompt is done."""
