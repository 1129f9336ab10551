"""Who reads the bytes of weights: our own reader, or a package that reads ahead, from files or an object store."""
