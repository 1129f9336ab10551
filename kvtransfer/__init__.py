"""KV pages: how they lie in memory, and how they move between replicas."""
