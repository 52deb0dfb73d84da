"""Tensors in, tensors out: everything that computes, and nothing else."""

import lazy_loader

# The public names stand in __init__.pyi. Each is imported when it is first used: importing torch takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
