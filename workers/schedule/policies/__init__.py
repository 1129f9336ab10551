"""Decide who goes first, and how much a step computes: due tokens, sizes of chunks, shares of tenants."""
