"""An engine in a process of its user: Python objects in, Python objects out."""
