"""Pictures from arrays, without a model."""
