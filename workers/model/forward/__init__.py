"""What a layer needs during a forward pass beside its arguments: pages, states, latents and rows of pictures."""
