"""Named models of the literature, and the few numbers that describe a regular model."""

import lazy_loader

# The public names stand in __init__.pyi. Each is imported when it is first used: specs take long to import.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
