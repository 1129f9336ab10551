"""The pages of a pool: their owners, the prefixes in them, and the next one to evict."""
