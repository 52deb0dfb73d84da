"""A hand-written part of a Transformer compared with the mathematics, and the mistake that explains a difference."""
