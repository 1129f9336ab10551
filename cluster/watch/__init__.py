"""Terminal commands that read a running server: chat and top."""
