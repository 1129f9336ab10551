"""One rank's part of a model: which layers and which slice of each weight, and how the ranks compute together."""
