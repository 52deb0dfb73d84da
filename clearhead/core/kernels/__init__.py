"""Functions on tensors below the core: the same results, faster."""
