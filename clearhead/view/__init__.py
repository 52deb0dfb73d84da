"""Look inside a model: observe and replace activations, alignments, pictures."""
