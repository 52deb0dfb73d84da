from .attention import Attention as Attention
from .context import Cache as Cache
from .context import Sequence as Sequence
from .model import Output as Output
from .model import Transformer as Transformer
from .model import build as build
from .rare.multi_head_attention import MultiHeadAttention as MultiHeadAttention
