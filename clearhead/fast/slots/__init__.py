"""Decoding with a KV cache of fixed size, so that a step can be recorded once and replayed without Python."""
