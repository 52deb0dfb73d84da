"""Generation from prompts in text, whole or streamed, and the scores of texts.

A prompt has the form of the training text: the start token and the prompt's tokens. An encoder-decoder model reads the
prompt, followed by the end token, with its encoder, and its decoder starts from the start token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.generate.batching import position_limit
from clearhead.generate.continuation import GenerateRequest, generate_ids, stream_ids
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.json_schema import Schema, with_schema
from clearhead.generate.options import REMOVED, GenerateOptions
from clearhead.generate.prefill import check_model
from clearhead.generate.results import Continuation, Generation
from clearhead.generate.scoring.targets import PairScore
from clearhead.generate.scoring.texts import score_sequences
from clearhead.generate.streaming_decoder import continuation_text
from clearhead.text.chat import ChatTemplate
from clearhead.text.long_texts import refuse_enormous
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer

MOST_ADDED_TOKENS: Final = 2**13
"""Tokens of its own that a chat template may put around a chat, which it may also repeat once."""


@dataclass(frozen=True)
class PromptFormat:
    """How a checkpoint reads prompts.

    Args:
        config: its generation settings.
        chat: the template for prompts that are messages; None: prompts are texts.
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
    schema: Schema | None = None,
) -> list[list[Generation]]:
    """Continue each prompt.

    Args:
        module: a decoder-only or encoder-decoder model; one in training runs as a replica in evaluation mode.
        tokenizers: of the model; a decoder-only model uses that of the target.
        prompts: one text each.
        options: of generation.
        continues: the text of an encoder-decoder model continues the prompt, so that it may start with a space; False
            if it is another text, such as a translation.
        prompt_format: of a Hugging Face checkpoint; None: the model was trained here.
        schema: what each generated text follows, see `with_schema`; None: anything.

    Returns:
        For each prompt the generated sequences, without the prompt.

    Raises:
        InputError: the model cannot generate, or cannot read a prompt.
        RunFailure: the model's output is not a number, or the options ban every token.
    """
    request = generate_request(module, tokenizers, prompts, options, continues, prompt_format)
    if schema is not None:
        request = with_schema(request, schema, tokenizers.target, module.spec.num_outputs)
    return [
        [_generation(tokenizers.target, sequence, request.context(number), options.seed) for sequence in sequences]
        for number, sequences in enumerate(generate_ids(module, request))
    ]


def stream_text(
    module: Transformer,
    tokenizers: TokenizerPair,
    prompt: str,
    options: GenerateOptions,
    *,
    continues: bool = True,
    prompt_format: PromptFormat | None = None,
    schema: Schema | None = None,
) -> Generator[str, None, Generation]:
    """Continue one prompt and yield the parts of its text as soon as they are final.

    Unfinished characters and possible starts of a stop text are held back.

    Args:
        module, tokenizers, options, continues, prompt_format, schema: as for `generate_texts`; the module is in
            evaluation mode until the generator is exhausted or closed.
        prompt: one text.

    Returns:
        The whole generation, as the value of the generator.

    Raises:
        InputError: as for `generate_texts`; or beam search or several sequences, which cannot be streamed.
    """
    request = generate_request(module, tokenizers, [prompt], options, continues, prompt_format)
    if schema is not None:
        request = with_schema(request, schema, tokenizers.target, module.spec.num_outputs)
    pieces = stream_ids(module, request)

    def stream() -> Generator[str, None, Generation]:
        sequence = yield from pieces
        return _generation(tokenizers.target, sequence, request.context(0), options.seed)

    return stream()


def score_texts(
    module: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    length_penalty: float = 1.0,
    batch_size: int | None = None,
) -> list[PairScore]:
    """Return the log-probabilities of texts under a decoder-only model, end token included.

    Args:
        module: a decoder-only model; one in training runs as a replica in evaluation mode.
        tokenizer: of the model.
        texts: to score; an empty one is the end token alone.
        window, stride, batch_size: as for `score_sequences`.
        length_penalty: exponent alpha of the score.

    Raises:
        InputError: the model does not predict next tokens, or cannot read such a window.
    """
    refuse_enormous(texts, module.max_positions)
    return score_sequences(
        module,
        with_special_tokens(tokenizer, texts),
        pad_id=tokenizer.pad_id,
        window=window,
        stride=stride,
        length_penalty=length_penalty,
        batch_size=batch_size,
    )


def with_special_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts with the special tokens that a language model was trained with."""
    return [tokenizer.special_tokens.for_target(ids) for ids in tokenizer.encode_batch(list(texts))]


def generate_request(
    module: Transformer,
    tokenizers: TokenizerPair,
    prompts: Sequence[str],
    options: GenerateOptions,
    continues: bool,
    prompt_format: PromptFormat | None,
) -> GenerateRequest:
    """Return prompts as ids, in the form that the model was trained on.

    Args:
        module, tokenizers, prompts, options, continues, prompt_format: as for `generate_texts`.

    Raises:
        InputError: the model cannot generate, or the checkpoint's settings are not supported.
    """
    source, target, has_encoder = tokenizers.source, tokenizers.target, module.encoder is not None
    check_model(module, with_sources=has_encoder)
    refuse_enormous(prompts, position_limit(module, options), "prompt")
    contexts = prompt_ids(source if has_encoder else target, prompts, prompt_format)
    if prompt_format is None:
        config, start, banned = GenerationConfig(), target.bos_id, [target.bos_id, target.pad_id]
    else:
        config, start, banned = prompt_format.config, prompt_format.config.decoder_start_id or 0, []
        check_generation_config(config, needs_start=has_encoder)
    sources, read = None, contexts
    if has_encoder:
        sources, read = contexts, [[start] for _ in contexts]
        if prompt_format is None:
            sources = [[*ids[1:], source.eos_id] for ids in contexts]
    return GenerateRequest(
        prompts=read,
        options=options,
        eos_id=next(iter(config.eos_ids), target.eos_id),
        pad_id=target.pad_id if config.pad_id is None else config.pad_id,
        banned=[*banned, *unused_outputs(module, target)],
        sources=sources,
        decode=target.decode,
        contexts=contexts if continues else read,
        config=config,
    )


def prompt_ids(tokenizer: Tokenizer, prompts: Sequence[str], prompt_format: PromptFormat | None) -> list[list[int]]:
    """Return the ids that a decoder reads for prompts: those of a model trained here begin with the start token.

    Args:
        tokenizer: of the prompts.
        prompts: one text each; one without tokens is the start token alone, where the checkpoint has one.
        prompt_format: of a Hugging Face checkpoint; None: the model was trained here.
    """
    if prompt_format is None:
        return [[tokenizer.bos_id, *ids] for ids in tokenizer.encode_batch(list(prompts))]
    bos = prompt_format.config.bos_id
    empty = [] if bos is None else [bos]
    return [encode_prompt(tokenizer, prompt, prompt_format.chat) or empty for prompt in prompts]


def check_generation_config(config: GenerationConfig, *, needs_start: bool) -> None:
    """Refuse generation settings that are not supported or incomplete.

    Args:
        config: the settings of a checkpoint.
        needs_start: the model has a decoder behind an encoder, which needs a start token.

    Raises:
        InputError: a setting is not supported, or there is no start token.
    """
    faults = [
        f"the checkpoint's generation settings ask for {key}, which is not supported" + _reason(key)
        for key in config.unsupported
    ]
    if needs_start and config.decoder_start_id is None:
        faults.append("the checkpoint has no decoder_start_token_id for its decoder")
    if faults:
        raise InputError.from_faults(faults, subject="the checkpoint's generation settings")


def _reason(key: str) -> str:
    return f": {REMOVED[key]}" if key in REMOVED else ""


def encode_prompt(tokenizer: Tokenizer, text: str, chat: ChatTemplate | None = None) -> list[int]:
    """Return the ids of a prompt with special tokens.

    Args:
        tokenizer: of the checkpoint.
        text: the prompt, or the only message of a chat.
        chat: the template for a message; None: the prompt is a text.

    Raises:
        InputError: the template refuses the message, or makes far more tokens than it has.
    """
    if chat is not None:
        ids = tokenizer.encode_with_special(chat.render([{"role": "user", "content": text}]))
        most = MOST_ADDED_TOKENS + 2 * len(tokenizer.encode(text))
        if len(ids) > most:
            raise InputError(
                f"the chat template makes {len(ids):,} tokens of this chat, which are too many (at most {most:,})"
            )
        return ids
    return tokenizer.special_tokens.add_to(tokenizer.encode(text))[0]


def unused_outputs(module: Transformer, tokenizer: Tokenizer) -> range:
    """Return the outputs of a padded embedding table that have no vocabulary entry."""
    assert module.spec.num_outputs is not None, "a model that predicts tokens has a head"
    return range(tokenizer.vocab_size, module.spec.num_outputs)


def _generation(tokenizer: Tokenizer, sequence: Continuation, context: Sequence[int], seed: int | None) -> Generation:
    """Return a continuation in text."""
    ids = sequence.ids[:-1] if sequence.stop_reason == "end" else sequence.ids
    text = continuation_text(tokenizer.decode, ids, context) if sequence.text is None else sequence.text
    return Generation(text, tokenizer.tokens(sequence.ids), sequence.score, sequence.stop_reason, seed)
