"""clearhead: Transformers you can see through."""

import lazy_loader

# __init__.pyi declares the public names. Each is imported at its first use, since importing torch takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
