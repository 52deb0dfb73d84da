"""Checks of hand-written parts of a Transformer: compare with the mathematics, and name the mistake."""
