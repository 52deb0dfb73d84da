"""Modules that few models need; each extends or replaces a module of the plain Transformer."""
