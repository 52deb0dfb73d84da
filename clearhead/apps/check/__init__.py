"""Checks of models: loaded models, hand-written Transformers, training jobs, and parity with transformers."""

import lazy_loader

# The public names are in __init__.pyi. Each is imported when it is first used: importing torch takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
