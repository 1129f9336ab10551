"""Read the bytes of weights: by our own reader, or by a package that reads ahead, from files or an object store."""
