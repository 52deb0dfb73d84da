"""Generation settings of a Hugging Face checkpoint: start and end, forced and banned tokens, default options."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from clearhead.base.errors import InputError, Message, argument
from clearhead.base.files import convert_json
from clearhead.generate.options import DECLARED, MOST_TOKENS, GenerateOptions, number_type
from clearhead.generate.processors import BannedIds, BannedSequences, ForcedAt, Processor

# clearhead's names of the options that generation_config.json has keys for.
_OPTIONS: Mapping[str, str] = {
    option.hf: name for name, (_, option) in DECLARED[GenerateOptions].items() if option.hf is not None
}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Unsupported keys that change the generated text, with the values that have no effect.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "num_beam_groups": (1,),
    "max_time": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "sequence_bias": (),
    "guidance_scale": (1.0,),
    "exponential_decay_length_penalty": (),
    "constraints": (),
    "force_words_ids": (),
    "stop_strings": (),
    "forced_decoder_ids": (),
    "watermarking_config": (),
    "dola_layers": (),
    "prompt_lookup_num_tokens": (),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "penalty_alpha": (0.0,),
}


_Id = Annotated[int, Field(ge=0, lt=2**31)]
# Some files write "no such token" as -1.
_OptionalId = Annotated[int, Field(ge=-1, lt=2**31)]
_Length = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class _Keys(BaseModel):
    """Keys of generation_config.json that are read and are not options, with their types and ranges."""

    max_length: _Length | None = None
    min_length: _Length | None = None
    do_sample: bool | None = None
    early_stopping: bool | Literal["never"] | None = None
    decoder_start_token_id: _Id | list[_Id] | None = None
    bos_token_id: _OptionalId | list[_OptionalId] | None = None
    pad_token_id: _OptionalId | list[_OptionalId] | None = None
    forced_bos_token_id: _Id | list[_Id] | None = None
    forced_eos_token_id: _Id | list[_Id] | None = None
    eos_token_id: _OptionalId | list[_OptionalId] | None = None
    suppress_tokens: list[_Id] | None = None
    begin_suppress_tokens: list[_Id] | None = None
    bad_words_ids: list[Annotated[list[_Id], Field(min_length=1)]] | None = None


def _settings_model() -> type[_Keys]:
    """Return the pydantic model of all keys that clearhead reads, with the types and ranges of its options."""
    keys: dict[str, Any] = {}
    for kind, option in DECLARED[GenerateOptions].values():
        most = option.most if option.hf_most is None else option.hf_most
        least: dict[str, Any] = {"gt" if option.above else "ge": option.least}
        if option.hf is not None:
            keys[option.hf] = (Annotated[number_type(kind), Field(**least, le=most)] | None, None)
    return create_model("_Settings", __base__=_Keys, **keys)


_Settings = _settings_model()


@dataclass(frozen=True)
class GenerationConfig:
    """Generation settings of a checkpoint.

    Args:
        decoder_start_id: start token of the decoder in an encoder-decoder model.
        bos_id: first token of a text without a prompt.
        eos_ids: tokens that end a sequence.
        pad_id: padding token.
        forced_bos_id: token that is generated first if the decoder's prompt is a single token.
        forced_eos_id: last token of a sequence that reaches the length limit.
        banned_ids: tokens that are never generated, even if forced or an end token.
        banned_first_ids: tokens that are never generated first, or never directly after a forced first token.
        banned_sequences: sequences of tokens that are not generated unless a token is forced.
        options: default values of options, by clearhead's names.
        max_length, min_length: maximum and minimum number of the decoder's tokens, including the prompt.
        unsupported: keys that have an effect and are not supported.
        early_stopping: stopping rule of beam search, see `SearchOptions`.
        task_prefixes: text before a prompt, by task.
        left_out: keys with an id outside the vocabulary; they are ignored.
    """

    decoder_start_id: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    forced_bos_id: int | None = None
    forced_eos_id: int | None = None
    banned_ids: tuple[int, ...] = ()
    banned_first_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    min_length: int = 0
    unsupported: tuple[str, ...] = ()
    early_stopping: bool | None = None
    task_prefixes: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], *, source: str) -> GenerationConfig:
        """Return the settings in generation_config.json, or in a config.json without that file.

        Args:
            settings: the parsed content; other keys are ignored.
            source: name of the file for messages.

        Raises:
            InputError: a value has the wrong type.
        """
        keys = _parse_settings(settings, source)
        options = _default_options(keys)
        ends, lasts = _ids(keys.eos_token_id), _ids(keys.forced_eos_token_id)
        words = [tuple(ids) for ids in keys.bad_words_ids or ()]
        return cls(
            decoder_start_id=_id(keys.decoder_start_token_id),
            bos_id=_id(keys.bos_token_id),
            eos_ids=ends,
            pad_id=_id(keys.pad_token_id),
            forced_bos_id=_id(keys.forced_bos_token_id),
            forced_eos_id=_id(keys.forced_eos_token_id),
            banned_ids=_ids(keys.suppress_tokens),
            banned_first_ids=_ids(keys.begin_suppress_tokens),
            # A banned sequence that is an end token has no effect.
            banned_sequences=tuple(word for word in words if word not in [(index,) for index in ends]),
            options=options,
            max_length=keys.max_length,
            min_length=0 if "min_new_tokens" in options else keys.min_length or 0,
            unsupported=_list_unsupported(settings, lasts),
            early_stopping=None if keys.early_stopping == "never" else keys.early_stopping,
        )

    def within(self, rows: int, source: str) -> GenerationConfig:
        """Return the settings without start and end tokens outside the vocabulary, which can never be generated.

        Args:
            rows: number of rows of the decoder's token embedding.
            source: name of the settings for messages.

        Raises:
            InputError: an id that the decoder must read or write, or a banned id, is outside the vocabulary.
        """
        needed = {
            "suppress_tokens": self.banned_ids,
            "begin_suppress_tokens": self.banned_first_ids,
            "bad_words_ids": tuple(index for ids in self.banned_sequences for index in ids),
            "decoder_start_token_id": _ids(self.decoder_start_id),
            "pad_token_id": _ids(self.pad_id),
            "forced_bos_token_id": _ids(self.forced_bos_id),
        }
        outside = _ids_beyond(rows, needed)
        if outside:
            raise InputError(
                f"{source}: {' and '.join(outside)} {'is' if len(outside) == 1 else 'are'} outside the vocabulary, "
                f"which has {rows} entries, 0 to {rows - 1}: correct generation_config.json or config.json"
            )
        bos, last = (None if index is None or index >= rows else index for index in (self.bos_id, self.forced_eos_id))
        left_out = {
            "bos_token_id": _ids(self.bos_id),
            "eos_token_id": self.eos_ids,
            "forced_eos_token_id": _ids(self.forced_eos_id),
        }
        ends = tuple(index for index in self.eos_ids if index < rows)
        return replace(self, bos_id=bos, eos_ids=ends, forced_eos_id=last, left_out=tuple(_ids_beyond(rows, left_out)))

    def settings(self, *, has_encoder: bool, max_positions: int | None) -> dict[str, Any]:
        """Return the settings of all options of generation and search, by name.

        Args:
            has_encoder: True if the model has an encoder.
            max_positions: number of positions of the decoder. None means no limit.
        """
        settings = {"early_stopping": self.early_stopping, **self.options}
        # The limits in the file count the prompt, or the start token of the decoder in an encoder-decoder model.
        longest = self.options.get("max_new_tokens", (self.max_length or 1) - 1)
        if self.max_length:
            settings.setdefault("max_new_tokens", self.max_length)
        if has_encoder and self.min_length > 1:
            settings.setdefault("min_new_tokens", self.min_length - 1)
        if longest > 0:
            settings["max_length"] = min(longest, max_positions or longest)
        if settings.get("min_new_tokens"):
            # `min_length` counts the end token.
            shortest = settings["min_new_tokens"] + 1
            settings["min_length"] = min(shortest, max_positions or shortest)
        return settings

    def processors(self, prompt_length: int, limit: int | None, *, num_prompt: int = 1) -> list[Processor]:
        """Return the logits processors of the settings, in order, to run after those of the options.

        Args:
            prompt_length: number of tokens of the prompt, with padding.
            limit: maximum number of generated tokens. None means that no end token is forced.
            num_prompt: number of tokens of the prompt, without padding.
        """
        chain: list[Processor] = []
        words = self._banned_words(1)
        if words:
            chain.append(BannedIds(sum(words, ())))
        if len(words) < len(self.banned_sequences):
            chain.append(BannedSequences(self._banned_words(2)))
        first = prompt_length
        if self.forced_bos_id is not None and num_prompt == 1:
            chain.append(ForcedAt(self.forced_bos_id, prompt_length))
            first += 1
        if self.forced_eos_id is not None and limit is not None:
            chain.append(ForcedAt(self.forced_eos_id, prompt_length + limit - 1))
        if self.banned_ids:
            chain.append(BannedIds(self.banned_ids))
        if self.banned_first_ids:
            chain.append(BannedIds(self.banned_first_ids, first, first + 1))
        return chain

    def _banned_words(self, least: int) -> tuple[tuple[int, ...], ...]:
        """Return the banned sequences of one token (`least` 1) or of several tokens (`least` 2)."""
        return tuple(word for word in self.banned_sequences if min(len(word), 2) == least)

    def rules_of(self, num_prompt: int, limit: int) -> Hashable:
        """Return a value that is equal for prompts with the same logits processors, which can start together.

        Args:
            num_prompt: number of tokens of the prompt, without padding.
            limit: maximum number of generated tokens.
        """
        length = num_prompt if num_prompt < self.min_length else None
        is_start = self.forced_bos_id is not None and num_prompt == 1
        return length, is_start, None if self.forced_eos_id is None else limit

    def lines(self) -> list[str]:
        """Return the settings as short lines for display."""
        words = self._banned_words(1)
        named = {
            "starts with": self.decoder_start_id,
            "ends with": self.eos_ids or None,
            "first after one token": self.forced_bos_id,
            "last at the greatest length": self.forced_eos_id,
            "never": (*self.banned_ids, *sum(words, ())) or None,
            "never first": self.banned_first_ids or None,
            "never in a row": self._banned_words(2) or None,
            "longest": self.max_length,
            "shortest": self.min_length or None,
        }
        shown = [f"{name} {_format_value(value)}" for name, value in named.items() if value is not None]
        shown += [f"{name} {value}" for name, value in self.options.items()]
        if self.early_stopping is not None:
            shown.append(f"early stopping of beam search: {str(self.early_stopping).lower()}")
        shown += [f"task {name}: {prefix}" for name, prefix in self.task_prefixes.items()]
        shown += [f"not in the vocabulary: {key}" for key in self.left_out]
        return [*shown, *(f"not supported: {key}" for key in self.unsupported)]


def _parse_settings(settings: Mapping[str, Any], source: str) -> _Keys:
    """Return the parsed settings; the error for a value that is too large names the option that may be larger."""
    try:
        return convert_json(
            {key: settings[key] for key in _Settings.model_fields if key in settings}, _Settings, name=source
        )
    except InputError as error:
        options = {"max_length": "max_new_tokens", "min_length": "min_new_tokens", **_OPTIONS}
        large = []
        for key in [reference.name for reference in error.about if reference.name in options]:
            most = DECLARED[GenerateOptions][options[key]][1].hf_most
            if most is not None and isinstance(settings[key], int) and settings[key] > most:
                large.append(argument(options[key]))
        if large:
            hint = Message(error.lines[-1], "; correct it there; ", Message(" and ").join(large), " may ask for more")
            error.lines = (*error.lines[:-1], hint)
        raise


def _ids_beyond(rows: int, ids: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the keys with an id outside the vocabulary, each with its largest id."""
    return [f"{key} = {max(listed)}" for key, listed in ids.items() if listed and max(listed) >= rows]


def _id(ids: int | list[int] | None) -> int | None:
    # Some files write an id as a list of one element.
    return next(iter(_ids(ids)), None)


def _ids(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return tuple(index for index in ([ids] if isinstance(ids, int) else ids) if index >= 0)


def _default_options(keys: _Keys) -> dict[str, Any]:
    """Return the default options: those of sampling only if `do_sample` is true, temperature 0 if it is false."""
    options = {name: value for key, name in _OPTIONS.items() if (value := getattr(keys, key)) is not None}
    has_beams = options.get("beam_size", 1) > 1
    if keys.do_sample is True and not has_beams:
        return {"temperature": 1.0, **options}
    for name in _SAMPLING:
        options.pop(name, None)
    if keys.do_sample is False and not has_beams:
        options["temperature"] = 0
    return options


def _list_unsupported(settings: Mapping[str, Any], lasts: tuple[int, ...]) -> tuple[str, ...]:
    faults = [key for key, idle in _UNSUPPORTED.items() if settings.get(key) not in (None, *idle, [], {})]
    if settings.get("do_sample") is True and (settings.get("num_beams") or 1) > 1:
        faults.append("do_sample together with num_beams")
    if len(lasts) > 1:
        faults.append("several values of forced_eos_token_id")
    return tuple(faults)


def _format_value(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    most = 8
    shown = ", ".join(map(_format_value, value[:most]))
    return f"{shown} and {len(value) - most} more" if len(value) > most else shown
