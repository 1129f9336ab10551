"""How weights are stored: found in a checkpoint, read, cut among ranks, and named by a fingerprint."""
