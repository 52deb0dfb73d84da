"""Programs built on the library: the commands, the server, and the code that only they need.

No other folder imports this one.
"""

import lazy_loader

# __init__.pyi declares the names that clearhead exports from these folders; each is imported at its first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
