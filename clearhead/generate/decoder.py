"""Generate, translate and score text with one model: `Decoder` turns texts into requests in ids and back.

A prompt has the form of the training text: the start token and the prompt's tokens. The encoder of an encoder-decoder
model reads the prompt followed by the end token; its decoder starts from the start token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from clearhead.base.errors import InputError, argument
from clearhead.base.hooks import naming_texts
from clearhead.core import Transformer
from clearhead.generate.batching import position_limit
from clearhead.generate.continuation import GenerateRequest, generate_ids, stream_ids
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.json_schema import Schema, with_schema
from clearhead.generate.options import REMOVED, GenerateOptions, SearchOptions
from clearhead.generate.prefill import check_model
from clearhead.generate.results import Continuation, Generation, Hypothesis, continuation_text
from clearhead.generate.scoring.texts import PairScore, score_targets
from clearhead.generate.search.recorder import BeamRecorder
from clearhead.text.chat import ChatTemplate
from clearhead.text.long_texts import encode_start, refuse_enormous, warn_of_long_texts
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.tokenizer import Tokenizer

LONGEST_SOURCE: Final = 512
"""Maximum number of tokens of a text to translate, for a model without a table of positions."""
MOST_ADDED_TOKENS: Final = 2**13
"""Maximum number of tokens that a chat template may add to a chat; it may also repeat the chat once."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model that generates text, with its tokenizers and settings.

    Args:
        module: a decoder-only or encoder-decoder model. If it is in training mode, a replica in evaluation mode runs.
        tokenizers: tokenizers of source and target. A decoder-only model uses the target's.
        special_tokens: special tokens around the sources and targets of translations.
        config: generation settings of a Hugging Face checkpoint. None means a model trained by clearhead.
        max_length: length of the longest training text in tokens, with its special tokens. None means unknown. A longer
            text to translate is truncated. Without a table of positions, the limit is at least `LONGEST_SOURCE` tokens.
        chat: template that formats a prompt as a chat message. None means that prompts are plain texts.
        continues: True if the text of an encoder-decoder model continues the prompt and may start with a space. False
            means another text, such as a translation.
    """

    module: Transformer
    tokenizers: TokenizerPair
    special_tokens: SpecialTokens
    config: GenerationConfig | None = None
    max_length: int | None = None
    chat: ChatTemplate | None = None
    continues: bool = True

    def translate(self, texts: Sequence[str], options: SearchOptions) -> list[list[Hypothesis]]:
        """Translate texts by beam search; an empty text gives one empty hypothesis.

        Args:
            texts: texts to translate, one sentence in each.
            options: the options of the search.

        Raises:
            InputError: the model has a single stack, or a generation setting is not supported.
        """
        target = self.tokenizers.target
        filled = {number: text for number, text in enumerate(texts) if text.strip()}
        hypotheses = [[Hypothesis("", [], 0.0, 0.0)] for _ in texts]
        with naming_texts(filled, are_rows=False):
            request = self.translation_request([*filled.values()], options)
            searched = generate_ids(self.module, request)
        for number, candidates in zip(filled, searched, strict=True):
            hypotheses[number] = [
                Hypothesis(target.decode(best.ids), target.tokens(best.ids), best.score, best.log_probability, best.ids)
                for best in candidates
            ]
        return hypotheses

    def translate_best(self, texts: Sequence[str], options: SearchOptions) -> list[str]:
        """Return the best translation of each text; see `translate`."""
        return [hypotheses[0].text for hypotheses in self.translate(texts, options)]

    def generate(
        self, prompts: Sequence[str], options: GenerateOptions, schema: Schema | None = None
    ) -> list[list[Generation]]:
        """Continue each prompt and return its generated sequences, without the prompt.

        Args:
            prompts: texts of the prompts.
            options: the options of generation.
            schema: JSON schema of each generated text, see `with_schema`. None means any text.

        Raises:
            InputError: the model cannot generate, or cannot read a prompt.
            RunFailure: the model's output is not a number, or the options ban every token.
        """
        request = self.prompt_request(prompts, options, schema)
        return [
            [self._generation(sequence, request.context(number), options.seed) for sequence in sequences]
            for number, sequences in enumerate(generate_ids(self.module, request))
        ]

    def stream(
        self, prompt: str, options: GenerateOptions, schema: Schema | None = None
    ) -> Generator[str, None, Generation]:
        """Continue one prompt and yield its text in pieces, each as soon as no later token can change it.

        Unfinished characters and possible beginnings of a stop text are held back.

        Args:
            prompt: one text.
            options, schema: the arguments of `generate`.

        Returns:
            The whole generation, as the return value of the generator.

        Raises:
            InputError: as for `generate`; or the options ask for beam search or several sequences.
        """
        request = self.prompt_request([prompt], options, schema)
        pieces = stream_ids(self.module, request)

        def stream() -> Generator[str, None, Generation]:
            sequence = yield from pieces
            return self._generation(sequence, request.context(0), options.seed)

        return stream()

    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, length_penalty: float, batch_size: int | None = None
    ) -> list[PairScore]:
        """Return the score of each target given its source, computed as in beam search.

        Args:
            sources, targets: equally many texts.
            length_penalty: exponent alpha of the score.
            batch_size: maximum number of pairs in a batch. None means that a token budget decides.

        Raises:
            InputError: the model has a single stack, the counts differ, or a sequence exceeds the model's positions.
        """
        check_two_stacks(self.module)
        refuse_enormous(sources, self.module.spec.position_limit)
        refuse_enormous(targets, self.module.spec.position_limit, "target")
        source, target, special = self.tokenizers.source, self.tokenizers.target, self.special_tokens
        return score_targets(
            self.module,
            [special.for_source(ids) for ids in source.encode_batch(list(sources))],
            [special.for_target(ids) for ids in target.encode_batch(list(targets))],
            pad_id=source.pad_id,
            # A forced token has probability 1, as in beam search.
            forced=0 if self.config is None or self.config.forced_bos_id is None else 1,
            length_penalty=length_penalty,
            batch_size=batch_size,
        )

    def translation_request(
        self, texts: Sequence[str], options: SearchOptions, recorder: BeamRecorder | None = None
    ) -> GenerateRequest:
        """Return the request to translate texts; a warning gives the number of truncated texts.

        Args:
            texts: texts to translate, one sentence in each, none empty.
            options: the options of the search.
            recorder: records the candidates of the search for a single text. None means no record.

        Raises:
            InputError: as for `translate`.
        """
        check_two_stacks(self.module)
        limit = longest_sentence(self.module, self.max_length)
        around = self.special_tokens.for_source
        sources, is_cut = encode_start(self.tokenizers.source, texts, limit - len(around([])))
        warn_of_long_texts(sum(is_cut), limit)
        return replace(self.source_request([around(ids) for ids in sources], options), recorder=recorder)

    def source_request(self, sources: Sequence[Sequence[int]], options: SearchOptions) -> GenerateRequest:
        """Return the request to translate tokenized source texts.

        Args:
            sources: token ids that the encoder reads, one sequence per source, none empty.
            options: the options of the search.

        Raises:
            InputError: a generation setting is not supported.
        """
        target, pad_id, config = self.special_tokens.for_target, self.tokenizers.source.pad_id, GenerationConfig()
        banned: Sequence[int] = (target.prefix[0], pad_id)
        if self.config is not None:
            check_generation_config(self.config, needs_start=True)
            banned = unused_outputs(self.module, self.tokenizers.target)
            # A search forces the end token by itself, and takes the minimum length from its options.
            config = replace(self.config, forced_eos_id=None, min_length=0)
        return GenerateRequest(
            prompts=[[target.prefix[0]] for _ in sources],
            options=options,
            eos_id=target.suffix[-1],
            pad_id=pad_id if config.pad_id is None else config.pad_id,
            banned=banned,
            sources=sources,
            config=config,
        )

    def prompt_request(
        self, prompts: Sequence[str], options: GenerateOptions, schema: Schema | None = None
    ) -> GenerateRequest:
        """Return the request to continue prompts, tokenized like the training text.

        Args:
            prompts, options, schema: the arguments of `generate`.

        Raises:
            InputError: the model cannot generate, or the checkpoint's settings are not supported.
        """
        source, target, has_encoder = self.tokenizers.source, self.tokenizers.target, self.module.encoder is not None
        check_model(self.module, with_sources=has_encoder)
        limit = position_limit(self.module, options)
        if options.truncate:
            contexts = self.prompt_starts(prompts, limit)
        else:
            refuse_enormous(prompts, limit, "prompt")
            contexts = self.prompt_ids(prompts)
        config, start, banned = GenerationConfig(), target.bos_id, [target.bos_id, target.pad_id]
        if self.config is not None:
            config, start, banned = self.config, self.config.decoder_start_id or 0, []
            check_generation_config(config, needs_start=has_encoder)
        sources, read = None, contexts
        if has_encoder:
            sources, read = contexts, [[start] for _ in contexts]
            if self.config is None:
                sources = [[*ids[1:], source.eos_id] for ids in contexts]
        request = GenerateRequest(
            prompts=read,
            options=options,
            eos_id=next(iter(config.eos_ids), target.eos_id),
            pad_id=target.pad_id if config.pad_id is None else config.pad_id,
            banned=[*banned, *unused_outputs(self.module, target)],
            sources=sources,
            decode=target.decode,
            contexts=contexts if self.continues else read,
            config=config,
        )
        return request if schema is None else with_schema(request, schema, target, self.module.spec.num_outputs)

    def prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the ids of prompts for the encoder, or for the decoder of a decoder-only model.

        A model trained by clearhead gets the start token first.

        Args:
            prompts: the texts of the prompts. An empty text becomes the start token, if the checkpoint has one.
        """
        tokenizer = self.tokenizers.target if self.module.encoder is None else self.tokenizers.source
        if self.config is None:
            return [[tokenizer.bos_id, *ids] for ids in tokenizer.encode_batch(list(prompts))]
        empty = [] if self.config.bos_id is None else [self.config.bos_id]
        return [encode_prompt(tokenizer, prompt, self.chat) or empty for prompt in prompts]

    def prompt_starts(self, prompts: Sequence[str], limit: int | None) -> list[list[int]]:
        """Return the ids of prompts, truncated to the encoder's limit; a warning gives the number of truncated texts.

        Args:
            prompts: texts of the prompts.
            limit: maximum number of tokens that the encoder reads, including special tokens.

        Raises:
            InputError: the model has no encoder, its positions have no limit, or prompts are chat messages.
        """
        if self.module.encoder is None or limit is None or self.chat is not None:
            reason = "a decoder continues the end of its prompt"
            if self.module.encoder is not None:
                reason = "a chat cannot be truncated" if limit else "the positions of this model have no limit"
            raise InputError(
                argument("truncate") + f" cuts a text at the positions of an encoder, and {reason}: leave it out"
            )
        tokenizer, config = self.tokenizers.source, self.config
        # A model trained by clearhead reads an end token instead of the start token, see `prompt_request`.
        num_special = 1 if config is None else len(tokenizer.special_tokens.add_to([])[0])
        starts, is_cut = encode_start(tokenizer, prompts, limit - num_special)
        warn_of_long_texts(sum(is_cut), limit)
        if config is None:
            return [[tokenizer.bos_id, *ids] for ids in starts]
        empty = [] if config.bos_id is None else [config.bos_id]
        return [tokenizer.special_tokens.add_to(ids)[0] or empty for ids in starts]

    def _generation(self, sequence: Continuation, context: Sequence[int], seed: int | None) -> Generation:
        """Return a continuation with its ids decoded to text."""
        tokenizer = self.tokenizers.target
        ids = sequence.ids[:-1] if sequence.stop_reason == "end" else sequence.ids
        text = continuation_text(tokenizer.decode, ids, context) if sequence.text is None else sequence.text
        return Generation(text, tokenizer.tokens(sequence.ids), sequence.score, sequence.stop_reason, seed)


def check_two_stacks(module: Transformer) -> None:
    """Refuse models without an encoder and a decoder.

    Raises:
        InputError: a stack is missing.
    """
    if module.encoder is None or module.decoder is None:
        raise InputError("translation needs a model with encoder and decoder, but this model has a single stack")


def longest_sentence(module: Transformer, max_length: int | None) -> int:
    """Return the maximum number of tokens of a text to translate, including special tokens.

    Args:
        module: an encoder-decoder model.
        max_length: length of the longest training text, as for `Decoder`.
    """
    longest = module.max_positions or max(max_length or 0, LONGEST_SOURCE)
    return min(longest, module.spec.position_limit or longest)


def check_generation_config(config: GenerationConfig, *, needs_start: bool) -> None:
    """Refuse generation settings that are not supported or incomplete.

    Args:
        config: the settings of a checkpoint.
        needs_start: True if the model has an encoder and a decoder, so that the decoder needs a start token.

    Raises:
        InputError: a setting is not supported, or there is no start token.
    """
    faults = [
        f"the checkpoint's generation settings ask for {key}, which is not supported" + _reason(key)
        for key in config.unsupported
    ]
    if needs_start and config.decoder_start_id is None:
        faults.append("the checkpoint has no decoder_start_token_id for its decoder: add it to generation_config.json")
    if faults:
        raise InputError.from_faults(faults, subject="the checkpoint's generation settings")


def _reason(key: str) -> str:
    return f": {REMOVED[key]}" if key in REMOVED else ""


def encode_prompt(tokenizer: Tokenizer, text: str, chat: ChatTemplate | None = None) -> list[int]:
    """Return the ids of a prompt, including special tokens.

    Args:
        tokenizer: tokenizer of the checkpoint.
        text: the prompt, or the only message of a chat.
        chat: template that formats the text as a chat message. None means a plain text.

    Raises:
        InputError: the template refuses the message, or makes far more tokens than the message has.
    """
    if chat is not None:
        ids = tokenizer.encode_with_special(chat.render([{"role": "user", "content": text}]))
        most = MOST_ADDED_TOKENS + 2 * len(tokenizer.encode(text))
        if len(ids) > most:
            raise InputError(
                f"the chat template makes {len(ids):,} tokens of this chat, but at most {most:,} are allowed"
            )
        return ids
    return tokenizer.special_tokens.add_to(tokenizer.encode(text))[0]


def unused_outputs(module: Transformer, tokenizer: Tokenizer) -> range:
    """Return the indices of outputs without a vocabulary entry: the padding rows of the embedding table."""
    assert module.spec.num_outputs is not None, "the model must have a head over a vocabulary"
    return range(tokenizer.vocab_size, module.spec.num_outputs)
