"""Items of prompts: their tokens, what encoding them costs, and which embeddings are where."""
