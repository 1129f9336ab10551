"""The Ray that `crossdock serve` starts on one machine, with fewer processes."""
