"""Layers that replace those of transformers, where the logits stay the same."""
