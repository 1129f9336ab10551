"""Drafts of a stream's next tokens: how many pay, and what becomes of them in a step."""
