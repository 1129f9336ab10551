"""Name what all rooms speak of: submission, request, SLO class, picture, the hash of a page, batch."""
