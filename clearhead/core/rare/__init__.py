"""Parts that few models need: each overrides or replaces one part of the plain Transformer."""
