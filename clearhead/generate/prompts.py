"""From a prompt in text to what a model says next, whole or as it comes, and how probable a text is.

A model reads a prompt as it read its training text: the start token and the prompt's tokens. An empty prompt is the
start token alone. A model with an encoder reads the prompt there, closed by the end token, and its decoder begins at
the start token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.generate.continuation import GenerateRequest, generate_ids, stream_ids
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import GenerateOptions
from clearhead.generate.prefill import check_model
from clearhead.generate.results import Continuation, Generation
from clearhead.generate.scoring.targets import PairScore
from clearhead.generate.scoring.texts import score_sequences
from clearhead.generate.streaming_decoder import text_behind
from clearhead.text.chat import ChatTemplate
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptFormat:
    """How a checkpoint reads prompts, beside what stands around its texts.

    Args:
        config: what its files say about generation.
        chat: how it reads a prompt as a message to it; None: a prompt is a text.
    """

    config: GenerationConfig
    chat: ChatTemplate | None = None


def generate_texts(
    module: Transformer,
    tokenizers: TokenizerPair,
    prompts: Sequence[str],
    options: GenerateOptions,
    *,
    continues: bool = True,
    prompt_format: PromptFormat | None = None,
) -> list[list[Generation]]:
    """Continue each prompt.

    Args:
        module: a decoder-only or encoder-decoder model; run in evaluation mode, its own mode is restored.
        tokenizers: of the model; a decoder alone uses that of the target.
        prompts: one text each.
        options: how to continue them.
        continues: whether the text of a model with an encoder stands behind the prompt, so that it may begin with a
            space; False where it was trained to say something else about what it reads.
        prompt_format: how a checkpoint reads prompts; None: a model that was trained here.

    Returns:
        For each prompt the sequences asked for; text and tokens exclude the prompt.

    Raises:
        InputError: a model that cannot generate, or a prompt that it cannot read.
        RunFailure: the model's output is not a number, or the options ban every token.
    """
    if isinstance(prompts, str):
        raise InputError("prompts must be a list of texts; put the single text into a list")
    request = _request(module, tokenizers, prompts, options, continues, prompt_format)
    found = generate_ids(module, request)
    return [
        [_generation(tokenizers.target, one, request.context(number)) for one in some]
        for number, some in enumerate(found)
    ]


def stream_text(
    module: Transformer,
    tokenizers: TokenizerPair,
    prompt: str,
    options: GenerateOptions,
    *,
    continues: bool = True,
    prompt_format: PromptFormat | None = None,
) -> Generator[str, None, Generation]:
    """Continue one prompt and yield its text as it becomes certain; the pieces together are the text.

    Held back are unfinished characters, and what may be the beginning of a stop text.

    Args:
        module, tokenizers, options, continues, prompt_format: as for `generate_texts`; the module is in evaluation mode
            until the generator is exhausted or closed.
        prompt: one text.

    Returns:
        The whole generation, as the value of the generator.

    Raises:
        InputError: as for `generate_texts`; or beam search, or several sequences, which are no single growing text.
    """
    request = _request(module, tokenizers, [prompt], options, continues, prompt_format)
    pieces = stream_ids(module, request)

    def stream() -> Generator[str, None, Generation]:
        found = yield from pieces
        return _generation(tokenizers.target, found, request.context(0))

    return stream()


def score_texts(
    module: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    length_penalty: float = 1.0,
) -> list[PairScore]:
    """Return how probable a decoder finds each text, end token included.

    Args:
        module: a decoder alone; run in evaluation mode, its own mode is restored.
        tokenizer: of the model.
        texts: texts to score; an empty one is the end token alone.
        window, stride: as for `score_sequences`.
        length_penalty: exponent alpha of the score.

    Raises:
        InputError: a model that cannot say a next token, or a window that it cannot read.
    """
    return score_sequences(
        module,
        with_special_tokens(tokenizer, texts),
        pad_id=tokenizer.pad_id,
        window=window,
        stride=stride,
        length_penalty=length_penalty,
    )


def with_special_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts with the special tokens that a language model was trained with."""
    return [tokenizer.special_tokens.for_target(ids) for ids in tokenizer.encode_batch(list(texts))]


def _request(
    module: Transformer,
    tokenizers: TokenizerPair,
    prompts: Sequence[str],
    options: GenerateOptions,
    continues: bool,
    prompt_format: PromptFormat | None,
) -> GenerateRequest:
    """Return prompts in the form in which the stacks read them."""
    source, target = tokenizers.source, tokenizers.target
    has_encoder = module.encoder is not None
    check_model(module, with_sources=has_encoder)
    if prompt_format is not None:
        return _checkpoint_request(module, tokenizers, prompts, options, continues, prompt_format)
    encoded = (source if has_encoder else target).encode_batch(list(prompts))
    starts = [[target.bos_id] for _ in encoded]
    framed = [[target.bos_id, *ids] for ids in encoded]
    return GenerateRequest(
        prompts=starts if has_encoder else framed,
        options=options,
        eos_id=target.eos_id,
        pad_id=target.pad_id,
        banned=_banned(module, target),
        sources=[[*ids, source.eos_id] for ids in encoded] if has_encoder else None,
        decode=target.decode,
        contexts=framed if continues or not has_encoder else starts,
    )


def _checkpoint_request(
    module: Transformer,
    tokenizers: TokenizerPair,
    prompts: Sequence[str],
    options: GenerateOptions,
    continues: bool,
    prompt_format: PromptFormat,
) -> GenerateRequest:
    """Return prompts as a checkpoint reads them: with its own template around them, and its own rules behind them."""
    source, target, config = tokenizers.source, tokenizers.target, prompt_format.config
    has_encoder = module.encoder is not None
    check_generation_config(config, needs_start=has_encoder)
    framed = [encode_prompt(source if has_encoder else target, prompt, prompt_format.chat) for prompt in prompts]
    starts = framed
    if has_encoder:
        assert config.decoder_start_id is not None
        starts = [[config.decoder_start_id] for _ in framed]
    elif config.bos_id is not None:
        starts = framed = [ids or [config.bos_id] for ids in framed]
    return GenerateRequest(
        prompts=starts,
        options=options,
        eos_id=config.eos_ids[0] if config.eos_ids else target.eos_id,
        pad_id=target.pad_id if config.pad_id is None else config.pad_id,
        banned=[*config.banned_ids, *wordless(module, target)],
        sources=framed if has_encoder else None,
        decode=target.decode,
        contexts=framed if continues or not has_encoder else starts,
        config=config,
    )


def check_generation_config(config: GenerationConfig, *, needs_start: bool) -> None:
    """Refuse to generate where the result would not be what a checkpoint's files ask for.

    Args:
        config: what they say.
        needs_start: a decoder behind an encoder must begin somewhere.

    Raises:
        InputError: they ask for what is not done here, or do not say where a decoder begins.
    """
    faults = [
        f"the checkpoint's generation settings ask for {key}, which is not supported" for key in config.unsupported
    ]
    if needs_start and config.decoder_start_id is None:
        faults.append("the checkpoint names no decoder_start_token_id, so that its decoder has no beginning")
    if faults:
        raise InputError.from_faults(faults, subject="the checkpoint's generation settings")


def encode_prompt(tokenizer: Tokenizer, text: str, chat: ChatTemplate | None = None) -> list[int]:
    """Return the ids that a checkpoint reads for a text, or for a chat of one message where a template is given.

    Args:
        tokenizer: of the checkpoint, with its special tokens.
        text: the text, or the message.
        chat: how messages are written out, special tokens included.

    Raises:
        InputError: a template that refuses the message.
    """
    if chat is not None:
        return tokenizer.encode_with_special(chat.render([{"role": "user", "content": text}]))
    return tokenizer.special_tokens.add_to(tokenizer.encode(text))[0]


def _banned(module: Transformer, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that are no text: start and padding, and outputs without an entry in the vocabulary."""
    return [tokenizer.bos_id, tokenizer.pad_id, *wordless(module, tokenizer)]


def wordless(module: Transformer, tokenizer: Tokenizer) -> range:
    """Return the outputs without an entry in the vocabulary, as tables that were padded have them."""
    assert module.head is not None
    return range(tokenizer.vocab_size, len(module.head.projection().weight_VD))


def _generation(tokenizer: Tokenizer, found: Continuation, context: Sequence[int]) -> Generation:
    """Return a continuation in text."""
    ids = found.ids[:-1] if found.stop_reason == "end" else found.ids
    text = text_behind(tokenizer.decode, ids, context) if found.text is None else found.text
    return Generation(text, tokenizer.tokens(found.ids), found.score, found.stop_reason)
