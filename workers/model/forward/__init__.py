"""Give a layer what it needs during a forward pass beside its arguments: pages, states, latents, rows of pictures."""
