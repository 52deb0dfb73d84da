"""A model proved on itself: what it reads, what must not change its results, and what its weights look like."""
