"""The encoder of pictures and videos, and the embedding tokens that it makes."""
