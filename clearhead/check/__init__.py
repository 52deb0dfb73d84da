"""Proof that a model computes what it should: parity with another library, and where it ends."""
