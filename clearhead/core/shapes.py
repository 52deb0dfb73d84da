"""Type annotations with tensor shapes. Within one call, all axes of one name have the same size."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Ids = Int[Tensor, "batch tokens"]
Real = Bool[Tensor, "batch tokens"]  # True = a real token, False = padding
States = Float[Tensor, "batch tokens width"]

Memory = Float[Tensor, "sentences memory_tokens memory_width"]  # a sentence is shared by the rows that decode it
RealMemory = Bool[Tensor, "sentences memory_tokens"]

Queries = Float[Tensor, "batch heads queries head_size"]
Keys = Float[Tensor, "batch kv_heads keys head_size"]  # and values
Scores = Float[Tensor, "#batch heads queries keys"]
MayAttend = Bool[Tensor, "#batch #heads #queries keys"]  # True = may attend
