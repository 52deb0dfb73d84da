"""Inputs of a model's stacks for one text, tokenized in the same way as for its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch

from clearhead import core
from clearhead.base.errors import InputError, argument
from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator, ModelInputs
from clearhead.generate.batching import device_of
from clearhead.generate.continuation import generate_ids
from clearhead.generate.decoder import Decoder
from clearhead.generate.options import DecodingOptions, GenerateOptions, SearchOptions
from clearhead.generate.search.recorder import BeamRecorder, ConsideredToken
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.tasks.outputs import LONGEST_INPUT
from clearhead.tasks.use import collate_texts
from clearhead.text.long_texts import LONGEST_PROMPT, refuse_enormous
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import PrefixSuffix
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class MapInputs:
    """Inputs of a model's stacks for one text.

    Args:
        source: input of the first stack.
        target: input of the decoder of a two-stack model. None means one stack.
        labels: known ids of the tokens that follow each token that the decoder reads; empty for a model that predicts
            no next token.
        num_given: number of decoder tokens that were not generated, the end token of a given target included. None
            means a model that writes no text.
        affixes: special tokens around a text, for each stack.
        considered: candidates of the beam search that wrote the tokens; empty without a beam search.
    """

    source: core.Sequence
    target: core.Sequence | None
    labels: tuple[int, ...] = ()
    num_given: int | None = None
    affixes: tuple[PrefixSuffix, ...] = ()
    considered: tuple[ConsideredToken, ...] = ()

    @property
    def last(self) -> core.Sequence:
        """The input of the last stack."""
        return self.source if self.target is None else self.target

    @property
    def written(self) -> tuple[int, ...]:
        """Known ids that the decoder writes at each step, without the end token of a given target."""
        is_given = self.num_given is not None and self.num_given > self.last.ids.shape[1]
        return self.labels[:-1] if is_given else self.labels


class ReadKwargs(TypedDict, total=False):
    """Keyword arguments for the text that a model reads; see `ReadOptions`. None means the default."""

    beam_size: int | None
    chat: bool | None
    from_language: str | None
    to_language: str | None


@dataclass(frozen=True)
class ReadOptions:
    """Options for the inputs made from a text: target or generation, chat template and languages.

    Args:
        target: text that the decoder of a two-stack model reads. None means the text that it generates.
        generate: maximum number of tokens to generate. 0 means that a decoder-only model generates none, and that an
            encoder-decoder model generates up to its default limit.
        beam_size: beam size of the generation, at least 1; 1 is greedy.
        chat: True if the text is a message that the checkpoint's chat template formats.
        from_language, to_language: language codes of a multilingual checkpoint. None means the default.

    Raises:
        InputError: numbers out of range.
    """

    target: str | None = None
    generate: int = 0
    beam_size: int = 1
    chat: bool = False
    from_language: str | None = None
    to_language: str | None = None

    def __post_init__(self) -> None:
        for name, value, lowest in (("generate", self.generate, 0), ("beam_size", self.beam_size, 1)):
            if value < lowest:
                raise InputError(argument(name) + f" must be at least {lowest}, got {value}")

    @property
    def generation(self) -> dict[str, Any]:
        """Generation options for a decoder-only model."""
        search = {"temperature": 0} if self.beam_size == 1 else {}
        return {"max_new_tokens": self.generate, "beam_size": self.beam_size, "num_return_sequences": 1, **search}

    @property
    def search(self) -> dict[str, Any]:
        """Search options for generating a target."""
        limit = {"max_length": self.generate} if self.generate else {}
        return {"beam_size": self.beam_size, **limit}


def check_read_options(
    module: Transformer, task: TaskRecord, text: str | tuple[str, str], options: ReadOptions
) -> None:
    """Raise InputError if options have no effect for a model.

    Raises:
        InputError: some options have no effect; one report lists all of them.
    """
    writes, is_two = predicts_text(module, task), module.encoder is not None and module.decoder is not None
    faults = []
    generate = argument("generate")
    if options.target is not None and module.decoder is None:
        faults.append("this model has no decoder to read a target: leave the target out.")
    elif options.target is not None and not (is_two and writes):
        faults.append("a target needs a model with encoder and decoder that writes text: leave the target out.")
    if options.generate and not writes:
        faults.append(f"this model has the task '{task.kind}' and generates no text: leave " + generate + " out.")
    if module.max_positions is None and options.generate > LONGEST_INPUT:
        # A model with a table of positions stops generating at the last position.
        faults.append(generate + f" is {options.generate:,}, but at most {LONGEST_INPUT:,} tokens fit: generate fewer.")
    if options.generate and options.target is not None:
        either = argument("target") + " or " + generate
        faults.append("with a target, nothing is generated: leave " + either + " out.")
    generates = writes and options.target is None and (is_two or options.generate > 0)
    if options.beam_size > 1 and not generates:
        faults.append(argument("beam_size") + f" is {options.beam_size}, but nothing is generated: leave it out.")
    if options.chat and (is_two or not writes):
        faults.append("chat needs a decoder-only model that generates text: leave it out.")
    if (options.from_language or options.to_language) and not (is_two and writes):
        faults.append("languages need a model with encoder and decoder that writes text: leave them out.")
    if writes and not isinstance(text, str):
        faults.append("this model reads single texts, but got a pair: give one text.")
    if faults:
        raise InputError.from_faults(faults, subject="the arguments")


def predicts_text(module: Transformer, task: TaskRecord) -> bool:
    """Return whether a model writes text token by token (not labels, vectors or masked words)."""
    return module.decoder is not None and find_task(task.kind).writes


def read_input(module: Transformer, tokenizer: Tokenizer, task: TaskRecord, text: str | tuple[str, str]) -> MapInputs:
    """Tokenize a text, or a pair of texts, for a model that predicts labels, vectors or masked words.

    Args:
        module: model.
        tokenizer: tokenizer of the model.
        task: task that the model was trained for; the text is tokenized in the same way as for its predictions.
        text: one text, or a pair if the model reads pairs.

    Raises:
        InputError: a text is empty, longer than the model's positions, or not paired as in training.
    """
    columns = [text] if isinstance(text, str) else list(text)
    _check_texts(module, *columns)
    columns[0] = task.prompt + columns[0]
    collator = InputCollator.of(module.spec, tokenizer, task.repeats)
    read_texts = getattr(find_task(task.kind).module("use"), "read_texts", collate_texts)
    inputs: ModelInputs = read_texts(columns, collator, tokenizer, task).to(device_of(module))
    ids = inputs.ids
    _check_length(ids[0].tolist(), module, "text")
    target = None if inputs.target_ids is None else core.Sequence(inputs.target_ids, inputs.target_mask)
    affixes = [tokenizer.special_tokens.for_text]
    if target is not None:
        affixes.append(PrefixSuffix(() if collator.start is None else (collator.start,)))
    return MapInputs(core.Sequence(ids, segments=inputs.segments), target, affixes=tuple(affixes))


def read_prompt(decoder: Decoder, text: str, options: GenerateOptions | None) -> MapInputs:
    """Tokenize a prompt of a decoder-only model, and generate its continuation.

    Args:
        decoder: model with its decoding settings.
        text: prompt.
        options: generation options. None means that nothing is generated.

    Raises:
        InputError: the text is empty or longer than the model's positions, or the model cannot generate.
    """
    module, tokenizers = decoder.module, decoder.tokenizers
    _check_texts(module, text)
    (ids,) = decoder.prompt_ids([text])
    _check_length(ids, module, "text")
    written: tuple[int, ...] = ()
    recorder = None
    if options is not None:
        recorder = _recorder(options, tokenizers) if options.method == "beam" else None
        # Generation stops at the last position, and may go beyond the declared length, to show what happens there.
        options = replace(options, must_fit=False, beyond_positions=module.spec.declared_length is not None)
        request = decoder.prompt_request([text], options)
        written = generate_ids(module, replace(request, recorder=recorder))[0][0].ids
    # The model does not read a last generated token that is beyond its positions.
    read = [*ids, *written][: module.max_positions]
    ids_1T = torch.tensor([read], device=device_of(module))
    text_affixes = tokenizers.target.special_tokens.for_text
    affixes = PrefixSuffix((tokenizers.target.bos_id,)) if decoder.config is None else text_affixes
    return MapInputs(
        # Rotary scaling may depend on the total length: use that of the generation.
        core.Sequence(ids_1T, total_length=len(ids) + options.max_new_tokens if options else None),
        None,
        labels=(*ids, *written)[1:],
        num_given=len(ids),
        affixes=(affixes,),
        considered=recorder.list_candidates([written]) if recorder else (),
    )


def read_translation(decoder: Decoder, text: str, target: str | SearchOptions) -> MapInputs:
    """Tokenize a text for the encoder, and a given or generated target for the decoder.

    Args:
        decoder: encoder-decoder model with its decoding settings.
        text: text for the encoder.
        target: text for the decoder, or the options of the search that generates it.

    Raises:
        InputError: a text is empty or longer than the model's positions, or generation settings are not supported.
    """
    module, tokenizers, special_tokens = decoder.module, decoder.tokenizers, decoder.special_tokens
    _check_texts(module, text)
    affixes = special_tokens.for_target
    source = special_tokens.for_source(tokenizers.source.encode(text))
    _check_length(source, module, "text")
    considered: tuple[ConsideredToken, ...] = ()
    if isinstance(target, str):
        _check_texts(module, target, what="target")
        written = affixes(tokenizers.target.encode(target))
        _check_length(written[:-1], module, "target")
        num_given = len(written)
    else:
        recorder = _recorder(target, tokenizers)
        (candidates,) = generate_ids(module, decoder.translation_request([text], target, recorder))
        written, num_given = [affixes.prefix[0], *candidates[0].ids], 1
        considered = recorder.list_candidates([candidates[0].ids]) if target.beam_size > 1 else ()
    device = device_of(module)
    return MapInputs(
        core.Sequence(torch.tensor([source], device=device)),
        core.Sequence(torch.tensor([written[:-1]], device=device)),
        labels=tuple(written[1:]),
        num_given=num_given,
        affixes=(special_tokens.for_source, affixes.decoder_input),
        considered=considered,
    )


def _recorder(options: DecodingOptions, tokenizers: TokenizerPair) -> BeamRecorder:
    """Return a recorder of beam search candidates that hides padding, unknown and start tokens, but not end tokens."""
    roles = tokenizers.target.roles
    silent = [index for index in (roles.pad, roles.unk, roles.bos) if index is not None and index != roles.eos]
    return BeamRecorder(options.length_penalty, hidden=silent)


def _check_length(ids: Sequence[int], module: Transformer, what: str) -> None:
    if not ids:
        raise InputError(f"the {what} has no tokens: give at least one token")
    most = module.max_positions
    if len(ids) > (most or LONGEST_PROMPT):
        limit = f"the model has {most} positions" if most else f"at most {LONGEST_PROMPT:,} are read at once"
        raise InputError(f"the {what} has {len(ids)} tokens, but {limit}: shorten it")


def _check_texts(module: Transformer, *texts: str, what: str = "text") -> None:
    if not all(text.strip() for text in texts):
        raise InputError(f"the {what} is empty: give at least one word")
    refuse_enormous(texts, module.max_positions or LONGEST_INPUT, what)
