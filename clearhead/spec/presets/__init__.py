"""Specs of published models, and the hyperparameters that describe a regular model."""

import lazy_loader

# __init__.pyi declares the public names. Each is imported at its first use, because importing specs takes long.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
