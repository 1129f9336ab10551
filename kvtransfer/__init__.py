"""KV pages: where they lie in memory, and how they move between replicas."""
