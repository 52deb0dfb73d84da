"""PyTorch modules of a Transformer. The equation that they compute is at the top of `stack`.

Read in this order (lines of code): model 113, stack 87, attention 145, feedforward 37, norm 40, embedding 83, head 93,
context 114.
"""

import lazy_loader

# The public names are in __init__.pyi. Each is imported when it is first used: importing torch takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
