"""Which replica serves a request. Pure Python: imports neither ray nor torch."""
