"""Draw pictures and pages from arrays, without a model."""
