"""What to learn from plain text: objectives that turn pieces of a corpus into batches, with chance as an argument.

Each is made once and called as `objective(pieces, generator)`. A piece is an array of ids, framed as start token, text
and end token; the same pieces and a generator in the same state give the same batch.
"""

from clearhead.data.noise.build import build_noise
from clearhead.data.noise.infilling import Infill
from clearhead.data.noise.masking import Masked
from clearhead.data.noise.prefix import PrefixLM, PrefixSplit
from clearhead.data.noise.spans import Spans, num_sentinels

__all__ = ["Infill", "Masked", "PrefixLM", "PrefixSplit", "Spans", "build_noise", "num_sentinels"]
