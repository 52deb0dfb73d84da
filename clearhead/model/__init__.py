"""`Model`: loading, use, saving and training of a model."""
