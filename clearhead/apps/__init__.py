"""Programs built on the library: the commands, the server, and what only they need.

No other folder imports this one.
"""

import lazy_loader

# What clearhead exports of these folders stands in __init__.pyi, and is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
