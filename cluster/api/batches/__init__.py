"""Files and batches: lines of requests that are run beside those of clients."""
