"""Speak HTTP: connections, the guard before each request, keys and limits, JSON in and out."""
