"""Draft the next tokens of streams, for a step of the model to verify."""
