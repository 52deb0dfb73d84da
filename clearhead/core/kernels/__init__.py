"""Tensor functions of the core: fused attention, positions, cross-entropy, and the buffer of a KV cache."""
