"""Translations of texts and their scores, by an encoder-decoder model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypedDict

from clearhead.base.errors import InputError
from clearhead.base.hooks import naming_texts
from clearhead.core import Transformer
from clearhead.fast.replica import in_evaluation
from clearhead.generate.batching import check_lengths, device_of, pad_ids
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import SearchOptions
from clearhead.generate.prompts import check_generation_config, unused_outputs
from clearhead.generate.results import Candidate, Hypothesis
from clearhead.generate.rows import Sentence
from clearhead.generate.running import RunningBatch, Started, run_queue
from clearhead.generate.scoring.targets import PairScore, score_targets
from clearhead.generate.search.beam import start_translations
from clearhead.generate.search.recorder import BeamRecorder
from clearhead.text.long_texts import encode_start, refuse_enormous, warn_of_long_texts
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import SpecialTokens

# In tokens: what is read of a text by a model without a table of positions.
LONGEST_SOURCE = 512


def translate_texts(
    module: Transformer,
    tokenizers: TokenizerPair,
    texts: Sequence[str],
    options: SearchOptions,
    special_tokens: SpecialTokens,
    config: GenerationConfig | None,
    *,
    max_length: int | None = None,
) -> list[list[Hypothesis]]:
    """Translate texts by beam search; an empty text gives one empty hypothesis.

    Args:
        module: an encoder-decoder model.
        tokenizers: of the model.
        texts: one sentence each.
        options: of the search.
        special_tokens: of sources and of targets.
        config: of a Hugging Face checkpoint; None: the model was trained here.
        max_length: of the training texts, special tokens included; None: not known. A longer text is truncated, where
            the model has no table of positions to `LONGEST_SOURCE` tokens, if those of its training were no longer.

    Raises:
        InputError: a single stack, or generation settings that are not supported.
    """
    target, filled = tokenizers.target, {number: text for number, text in enumerate(texts) if text.strip()}
    with naming_texts(filled, are_rows=False):
        searched = search_translations(
            module, tokenizers, [*filled.values()], options, special_tokens, config, max_length=max_length
        )
    of_filled = iter(searched)
    results = []
    for text in texts:
        hypotheses = [Hypothesis("", [], 0.0, 0.0)]
        if text.strip():
            hypotheses = [
                Hypothesis(target.decode(best.ids), target.tokens(best.ids), best.score, best.log_probability, best.ids)
                for best in next(of_filled)
            ]
        results.append(hypotheses)
    return results


def search_translations(
    module: Transformer,
    tokenizers: TokenizerPair,
    texts: Sequence[str],
    options: SearchOptions,
    special_tokens: SpecialTokens,
    config: GenerationConfig | None,
    *,
    max_length: int | None = None,
    recorder: BeamRecorder | None = None,
) -> list[list[Candidate]]:
    """Return the best translations of each text as ids, best first.

    Args:
        module, tokenizers, options, special_tokens, config, max_length: as for `translate_texts`.
        texts: one sentence each, none empty.
        recorder: notes what the search considers for a single text; None: nothing is noted.

    Raises:
        InputError: as for `translate_texts`.
    """
    check_two_stacks(module)
    settings = _settings(module, tokenizers, special_tokens, config)
    sources = encode_sources(module, tokenizers, texts, special_tokens, max_length=max_length)
    return translate_ids(module, sources, options=options, recorder=recorder, **settings)


class _Settings(TypedDict):
    bos_id: int
    eos_id: int
    pad_id: int
    config: GenerationConfig | None


def _settings(
    module: Transformer, tokenizers: TokenizerPair, special_tokens: SpecialTokens, config: GenerationConfig | None
) -> _Settings:
    affixes = special_tokens.for_target
    if config is not None:
        check_generation_config(config, needs_start=True)
        unused = {*unused_outputs(module, tokenizers.target)} - {*config.eos_ids}
        config = replace(config, banned_ids=(*config.banned_ids, *sorted(unused)))
    return {
        "bos_id": affixes.prefix[0],
        "eos_id": affixes.suffix[-1],
        "pad_id": tokenizers.source.pad_id if config is None or config.pad_id is None else config.pad_id,
        "config": config,
    }


def encode_sources(
    module: Transformer,
    tokenizers: TokenizerPair,
    texts: Sequence[str],
    special_tokens: SpecialTokens,
    *,
    max_length: int | None,
) -> list[list[int]]:
    """Return texts as the encoder reads them, truncated where they are too long; a warning counts those.

    Args:
        module, tokenizers, special_tokens, max_length: as for `translate_texts`.
        texts: one sentence each.
    """
    limit = longest_sentence(module, max_length)
    sources, is_cut = encode_start(tokenizers.source, texts, limit - len(special_tokens.for_source([])))
    warn_of_long_texts(sum(is_cut), limit)
    return [special_tokens.for_source(ids) for ids in sources]


def longest_sentence(module: Transformer, max_length: int | None) -> int:
    """Return how many tokens of a text are read, special ones included.

    Args:
        module: an encoder-decoder model.
        max_length: as for `translate_texts`.
    """
    longest = module.max_positions or max(max_length or 0, LONGEST_SOURCE)
    return min(longest, module.spec.position_limit or longest)


class TranslationReading:
    """One text that is read by the encoder, to be translated in a running batch.

    Args:
        module: an encoder-decoder model in evaluation mode.
        tokenizers, options, special_tokens, config, max_length: as for `translate_texts`.
        text: one sentence, not empty.

    Raises:
        InputError: as for `translate_texts`.
    """

    def __init__(
        self,
        module: Transformer,
        tokenizers: TokenizerPair,
        text: str,
        options: SearchOptions,
        special_tokens: SpecialTokens,
        config: GenerationConfig | None,
        *,
        max_length: int | None = None,
    ) -> None:
        check_two_stacks(module)
        (source,) = encode_sources(module, tokenizers, [text], special_tokens, max_length=max_length)
        check_lengths([source], module.spec.position_limit, what="source")
        self._module, self._source, self._options = module, source, options
        self._settings = _settings(module, tokenizers, special_tokens, config)
        self.num_shared: int = 0
        self.is_done: bool = False

    @property
    def num_tokens(self) -> int:
        """How many tokens are read."""
        return len(self._source)

    @property
    def num_cached(self) -> int:
        """The most tokens that it keeps in a cache, for each hypothesis."""
        return len(self._source) + self._options.target_limit(len(self._source), self._module.spec.position_limit)

    @property
    def kind(self) -> Hashable:
        """What readings have in common that may be read together."""
        return TranslationReading, self._options, tuple(self._settings.values())

    def step(self, others: Sequence[TranslationReading] = ()) -> list[Started]:
        """Read the text, with those of others of its kind, and start the search, with a sentence for each."""
        readings = [self, *others]
        for reading in readings:
            reading.is_done = True
        ids, mask = pad_ids(
            [reading._source for reading in readings], self._settings["pad_id"], device_of(self._module)
        )
        return [start_translations(self._module, ids, mask, options=self._options, **self._settings)]


def translate_ids(
    module: Transformer,
    sources: Sequence[Sequence[int]],
    *,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    options: SearchOptions,
    config: GenerationConfig | None = None,
    recorder: BeamRecorder | None = None,
) -> list[list[Candidate]]:
    """Return the best translations of each source, best first, in the order of the sources.

    Results do not depend on which sentences share a batch: to the last bit where
    `Runner.is_batch_invariant`, elsewhere up to rounding.

    Args:
        module: an encoder-decoder model; one in training runs as a replica in evaluation mode.
        sources: ids as the encoder reads them (end token included where the model was trained with one), none empty.
        bos_id: id the decoder starts from.
        eos_id: id that ends a hypothesis.
        pad_id: padding id, for sources and hypotheses.
        options: beam size, length penalty, limits and batch budget.
        config: of a Hugging Face checkpoint.
        recorder: notes what the search considers for a single source; None: nothing is noted.

    Raises:
        InputError: an empty source, one beyond the model's positions, or a length beyond the decoder's.
    """
    check_lengths(sources, module.spec.position_limit, what="source")
    module, device = in_evaluation(module), device_of(module)
    results: list[list[Candidate]] = [[] for _ in sources]

    def start(numbers: list[int]) -> list[Started]:
        ids_NS, mask_NS = pad_ids([sources[number] for number in numbers], pad_id, device)
        with naming_texts(numbers):
            started = start_translations(
                module,
                ids_NS,
                mask_NS,
                prompts=numbers,
                bos_id=bos_id,
                eos_id=eos_id,
                pad_id=pad_id,
                options=options,
                config=config,
                recorder=recorder,
            )
        return [started]

    costs = [len(source) * options.beam_size for source in sources]
    batch = RunningBatch(module)
    for progress in run_queue(batch, costs, start, budget=options.batch_tokens, most=options.batch_size):
        for event in progress:
            if isinstance(event.sequence, Sentence) and event.is_done:
                results[event.sequence.prompt] = event.sequence.ranked()
    return results


def score_translations(
    module: Transformer,
    tokenizers: TokenizerPair,
    sources: Sequence[str],
    targets: Sequence[str],
    special_tokens: SpecialTokens,
    config: GenerationConfig | None,
    *,
    length_penalty: float,
    batch_size: int | None = None,
) -> list[PairScore]:
    """Return the scores of targets given their sources, as search reports them.

    Args:
        module, tokenizers, special_tokens, config: as for `translate_texts`.
        sources, targets: as many sources as targets.
        length_penalty: exponent alpha of the score.
        batch_size: most pairs scored together; None: a token budget decides.

    Raises:
        InputError: a single stack, unequal counts, or a sequence beyond the model's positions.
    """
    check_two_stacks(module)
    refuse_enormous(sources, module.spec.position_limit)
    refuse_enormous(targets, module.spec.position_limit, "target")
    return score_targets(
        module,
        [special_tokens.for_source(ids) for ids in tokenizers.source.encode_batch(list(sources))],
        [special_tokens.for_target(ids) for ids in tokenizers.target.encode_batch(list(targets))],
        pad_id=tokenizers.source.pad_id,
        # A forced token has probability 1, as in search.
        forced=0 if config is None or config.forced_bos_id is None else 1,
        length_penalty=length_penalty,
        batch_size=batch_size,
    )


def check_two_stacks(module: Transformer) -> None:
    """Refuse models without an encoder and a decoder.

    Raises:
        InputError: a stack is missing.
    """
    if module.encoder is None or module.decoder is None:
        raise InputError("translation needs a model with encoder and decoder; this one has a single stack")
