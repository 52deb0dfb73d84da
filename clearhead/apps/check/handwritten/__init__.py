"""Checks of hand-written Transformer modules: compare with the mathematics, and name the known mistake."""
