"""Named models of the literature, and the few numbers that describe a regular model."""

from clearhead.presets.named import bert_base, gpt2, llama_tiny, t5_small, transformer_base, transformer_big

__all__ = ["bert_base", "gpt2", "llama_tiny", "t5_small", "transformer_base", "transformer_big"]
__dir__ = __all__.copy
