from .named import bert_base as bert_base
from .named import gpt2 as gpt2
from .named import llama_tiny as llama_tiny
from .named import t5_small as t5_small
from .named import transformer_base as transformer_base
from .named import transformer_big as transformer_big
