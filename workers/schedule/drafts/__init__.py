"""Drafts of a stream's next tokens: how many are worth their seconds, and which are accepted."""
