"""Count what fits on a device: weights, a step's tensors, and pages for the rest."""
