"""Tiers below a page pool: which pages lie there, and which are worth the way there and back."""
