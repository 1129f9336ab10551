"""The encoder of pictures and videos, and the rows of embeddings that it makes."""
