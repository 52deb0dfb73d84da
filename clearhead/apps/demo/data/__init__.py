"""Data that the demos make on this machine."""
