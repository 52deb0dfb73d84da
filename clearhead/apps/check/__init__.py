"""Proof that a model computes what it should: your own Transformer, and parity with another library."""

import lazy_loader

# The public names stand in __init__.pyi. Each is imported when it is first used: importing torch takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
