"""Sizes, limits and targets of the cases of `gpu_speed.py`. Imports only the standard library.

A limit follows from the arithmetic and the memory bandwidth of the device, which the benchmark measures first.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT_BYTES = 2
"""Bytes of a weight, a key and a value in bf16."""
LOGIT_BYTES = 14
"""Bytes that choosing a token moves per logit: some two passes in bf16 and three in fp32."""


@dataclass(frozen=True)
class DecoderSize:
    """Sizes of a decoder and its training batch.

    Args:
        layers, width, heads: the sizes of the model.
        rows, length: the rows of a batch, and the tokens of a row.
        vocabulary: the vocabulary of the step, which the peers use too.
        command_vocabulary: the vocabulary of the command, which the tokenizer decides.
        steps: the steps of a turn.
        command_steps: the steps of the command; the first line of its metrics does not count.
    """

    layers: int
    width: int
    heads: int
    rows: int
    length: int
    vocabulary: int
    command_vocabulary: int
    steps: int
    command_steps: int


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that generates, translates or embeds.

    Args:
        layers, width, heads: the sizes; a model of two stacks has `layers` in each.
        vocabulary: the number of entries.
        positions: the longest sequence in tokens.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int

    def bytes_of_step(self, rows: int, keys: float, memory_keys: int = 0) -> float:
        """Return the bytes that a decoding step moves: weights, keys and values, and logits.

        Args:
            rows: the rows that decode together, beams included.
            keys: the mean number of tokens before a step.
            memory_keys: the tokens of the source, whose keys a step reads too; 0 means one stack.
        """
        matrices = (14 if memory_keys else 12) * self.layers * self.width**2 + self.vocabulary * self.width
        read_keys = 2 * self.layers * self.width * (keys + memory_keys)
        return WEIGHT_BYTES * (matrices + rows * read_keys) + LOGIT_BYTES * rows * self.vocabulary

    def flops_of_tokens(self, rows: int, length: float, logit_rows: int) -> float:
        """Return the operations of a forward pass of one stack over rows of `length` tokens."""
        tokens = rows * length
        layers = self.layers * (24 * self.width**2 + 4 * length * self.width)
        return tokens * layers + 2 * logit_rows * self.vocabulary * self.width


@dataclass(frozen=True)
class Sizes:
    """All sizes of a run of the benchmark.

    Args:
        decoders: the decoders to train, by name.
        gpt2, marian, minilm: the models that generate, translate and embed.
        new_tokens: the tokens after a prompt.
        long_prompt: the tokens of the prompt whose first new token is timed.
        decode_rows: the batch sizes of greedy decoding.
        sampled_rows: the batch sizes of sampling with top-p.
        translations: the sentences and beams of each translation case.
        captions: the number of texts to embed.
        caption_batches: the batch sizes of embedding; None means batches by tokens.
        translation_layers: the layers of each stack in translation training.
        translation_steps: the steps of a turn of translation training.
        demo: the words after `clearhead` that run the demo; empty means that it is left out.
    """

    decoders: dict[str, DecoderSize]
    gpt2: ModelSize
    marian: ModelSize
    minilm: ModelSize
    new_tokens: int
    long_prompt: int
    decode_rows: tuple[int, ...]
    sampled_rows: tuple[int, ...]
    translations: tuple[tuple[int, int], ...]
    captions: int
    caption_batches: tuple[int | None, ...]
    translation_layers: int
    translation_steps: int
    demo: tuple[str, ...]


FULL = Sizes(
    decoders={
        "124M": DecoderSize(12, 768, 12, 16, 1024, 50_304, 50_257, steps=8, command_steps=80),
        "10.7M": DecoderSize(6, 384, 6, 16, 256, 65, 65, steps=50, command_steps=400),
    },
    gpt2=ModelSize(12, 768, 12, 50_257, 1024), marian=ModelSize(6, 512, 8, 32_000, 512),
    minilm=ModelSize(6, 384, 12, 30_522, 512), new_tokens=128, long_prompt=1000,
    decode_rows=(1, 8, 64, 256), sampled_rows=(1, 256), translations=((1, 1), (64, 1), (64, 4)), captions=20_000,
    caption_batches=(256, None), translation_layers=4, translation_steps=20, demo=("demo",),
)  # fmt: skip
TINY = Sizes(
    decoders={
        "124M": DecoderSize(1, 32, 2, 4, 32, 512, 509, steps=2, command_steps=24),
        "10.7M": DecoderSize(1, 16, 2, 4, 16, 65, 65, steps=2, command_steps=24),
    },
    gpt2=ModelSize(1, 32, 2, 300, 128), marian=ModelSize(1, 32, 2, 1_100, 64),
    minilm=ModelSize(1, 32, 2, 300, 64), new_tokens=4, long_prompt=40, decode_rows=(4,),
    sampled_rows=(1,), translations=((4, 2),), captions=40, caption_batches=(16, None), translation_layers=1,
    translation_steps=1, demo=(),
)  # fmt: skip
"""Sizes of a CPU: they run the same code within seconds and measure nothing."""


@dataclass(frozen=True)
class Target:
    """Target of a case: a rate, or a share of the rate of another side.

    Args:
        case, side: the case and the side that must reach the target.
        rate: the least rate in units per second; with `relative_to`, the least share of its rate.
        relative_to: the case and the side to compare with; None means an absolute rate.
    """

    case: str
    side: str
    rate: float
    relative_to: tuple[str, str] | None = None


STEP_SIDE, COMMAND_SIDE = "clearhead compiled", "clearhead train"
TARGETS = (
    Target("train-124M", STEP_SIDE, 0.95, ("train-124M", "nanoGPT compiled")),
    Target("command-124M", COMMAND_SIDE, 0.97, ("train-124M", STEP_SIDE)),
    Target("command-10.7M", COMMAND_SIDE, 0.9, ("train-10.7M", "nanoGPT compiled")),
    Target("decode-1", "clearhead", 1_100),
    Target("decode-8", "clearhead", 8_000),
    Target("decode-64", "clearhead", 45_000),
    Target("decode-256", "clearhead", 100_000),
    Target("translate-1x1", "clearhead", 1_200),
    Target("translate-64x1", "clearhead", 40_000),
    Target("translate-64x4", "clearhead", 28_000),
    Target("embed", "clearhead", 100_000),
    Target("first", "clearhead", 1.0, ("first", "clearhead eager")),
    Target("demo", "clearhead", 1 / 20),
)
"""Targets on one H100 in full size."""
