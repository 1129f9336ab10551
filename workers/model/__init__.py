"""One rank's model: load the weights, run a batch, sample the tokens."""
