"""Weight surgery: new models from old ones, with other layers, heads, vocabularies, positions or stacks.

Each operation takes a module, or a model with its tokenizers, and does not change it. It returns a new one of the same
kind, and a report of the tensors that were copied, changed, newly initialized and dropped.
"""

from clearhead.apps.surgery.heads import remove_heads, remove_neurons
from clearhead.apps.surgery.layers import keep_layers
from clearhead.apps.surgery.positions import resize_positions, scale_rotary
from clearhead.apps.surgery.report import EditedModel, SurgeryReport
from clearhead.apps.surgery.stacks import replace_head, to_encoder, to_encoder_decoder
from clearhead.apps.surgery.vocabulary import cut_vocabulary, grow_vocabulary

__all__ = [
    "EditedModel",
    "SurgeryReport",
    "cut_vocabulary",
    "grow_vocabulary",
    "keep_layers",
    "remove_heads",
    "remove_neurons",
    "replace_head",
    "resize_positions",
    "scale_rotary",
    "to_encoder",
    "to_encoder_decoder",
]


def __dir__() -> list[str]:
    return __all__.copy()
