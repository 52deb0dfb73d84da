"""What a model is: a frozen tree of sum types, validated whole, written to JSON and read back.

The tree mirrors the modules: the path of a node (`encoder.layers.0.steps.1.branches.0.function`) is the path of the
module built from it and the prefix of its weights. A shared table has one owner and `Reference`s to it.
"""

import lazy_loader

# The public names stand in __init__.pyi. Each is imported when it is first used: specs take long to import.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
