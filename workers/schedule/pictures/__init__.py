"""Items of prompts: their tokens, the cost of encoding, and the place of their embeddings."""
