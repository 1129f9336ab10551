"""One replica: engine, engine thread, handover of KV pages, ranks, and the Ray actor around them."""
