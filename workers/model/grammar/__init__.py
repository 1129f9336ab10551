"""Structured output: compile grammars within limits, and follow each request through its own."""
