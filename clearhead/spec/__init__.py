"""Descriptions of models: immutable trees of typed nodes, validated as a whole and stored as JSON.

The tree mirrors the modules. The path of a node, such as `encoder.layers.0.steps.1.branches.0.function`, is also the
path of its module and the prefix of its weights. A shared table has one owner; other nodes hold a `Reference` to it.
"""

import lazy_loader

# __init__.pyi declares the public names. Each is imported at its first use, because importing specs takes long.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
