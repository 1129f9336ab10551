"""Recurrent layers, whose states lie in KV pages."""
