"""Weight surgery: a spec and its tensors in, others out, over the addresses that both share.

Each operation takes a module or a model with its tokenizers, leaves it as it is, and returns a new one of the same kind
with a report of what was copied, changed, drawn and dropped.
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
