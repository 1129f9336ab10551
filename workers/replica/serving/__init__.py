"""Around the engine: its thread, the ingresses that read from it, its metrics, and the Ray actor."""
