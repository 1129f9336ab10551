"""Logits into tokens: edit each row, cut its tail, draw; and the log-probabilities to report."""
