"""The generation settings of a Hugging Face checkpoint: start and end, forced and banned tokens, default options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead.errors import InputError
from clearhead.generate.processors import BannedIds, BannedSequences, ForcedAt, Processor

# Keys of generation_config.json that are options, and their names here.
_OPTIONS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram_size",
    "num_beams": "beam_size",
    "length_penalty": "length_penalty",
    "penalty_alpha": "penalty_alpha",
    "num_return_sequences": "num_return_sequences",
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Keys that change what is generated and are not supported, with the values that have no effect.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "num_beam_groups": (1,),
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
}


@dataclass(frozen=True)
class GenerationConfig:
    """Generation settings of a checkpoint.

    Args:
        decoder_start_id: start token of the decoder of an encoder-decoder model.
        bos_id: first token of a text without a prompt.
        eos_ids: tokens that end a sequence.
        pad_id: padding token.
        forced_bos_id: token that is always generated first.
        forced_eos_id: last token of a sequence that reaches the length limit.
        banned_ids: tokens that are never generated.
        banned_first_ids: tokens that are never generated first.
        banned_sequences: sequences of several tokens that are never generated.
        options: default values of options, by their names here.
        max_length, min_length: limits of the decoder's tokens, prompt included.
        unsupported: keys with an effect that is not supported.
        early_stopping: beam search ends once as many hypotheses as beams have finished, instead of once no unfinished
            one can still beat them.
        task_prefixes: text in front of a prompt, by task.
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
    early_stopping: bool = False
    task_prefixes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], *, source: str) -> GenerationConfig:
        """Read the content of generation_config.json, or of a config.json without one.

        Args:
            settings: the parsed content; other keys are ignored.
            source: name of the file in messages.

        Raises:
            InputError: values of a wrong type.
        """
        faults: list[str] = []
        words = _sequences(settings, "bad_words_ids", faults)
        ends = _ids(settings, "eos_token_id", faults)
        lasts = _ids(settings, "forced_eos_token_id", faults)
        config = cls(
            decoder_start_id=_id(settings, "decoder_start_token_id", faults),
            bos_id=_id(settings, "bos_token_id", faults),
            eos_ids=ends,
            pad_id=_id(settings, "pad_token_id", faults),
            forced_bos_id=_id(settings, "forced_bos_token_id", faults),
            forced_eos_id=lasts[0] if lasts else None,
            # The end token is never banned.
            banned_ids=tuple(
                sorted({*_ids(settings, "suppress_tokens", faults), *(w[0] for w in words if len(w) == 1)} - {*ends})
            ),
            banned_first_ids=_ids(settings, "begin_suppress_tokens", faults),
            banned_sequences=tuple(word for word in words if len(word) > 1),
            options=_options(settings),
            max_length=_id(settings, "max_length", faults),
            min_length=_id(settings, "min_length", faults) or 0,
            unsupported=_unsupported(settings, lasts),
            early_stopping=settings.get("early_stopping") is True,
        )
        if settings.get("early_stopping") not in (None, True, False, "never"):
            faults.append(f"early_stopping must be true, false or 'never', not {settings['early_stopping']!r}")
        if faults:
            raise InputError.from_faults([f"{source}: {fault}" for fault in faults], subject=source)
        return config

    def options_with(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call: given options replace settings, and settings without effect are dropped.

        Args:
            given: the options of the call.
        """
        merged = {**self.options, **given}
        unused: tuple[str, ...] = ()
        if merged.get("beam_size", 1) > 1:
            unused = (*_SAMPLING, "penalty_alpha")
        elif merged.get("penalty_alpha", 0) > 0:
            unused = ("temperature", "top_p", "min_p", "num_return_sequences", "length_penalty")
        elif merged.get("temperature") == 0:
            unused = ("top_k", "top_p", "min_p", "num_return_sequences", "length_penalty")
        else:
            unused = ("length_penalty",)
        return {name: value for name, value in merged.items() if name in given or name not in unused}

    def processors(self, prompt_length: int, limit: int | None) -> list[Processor]:
        """Return the logits processors of the settings, in order.

        Args:
            prompt_length: tokens of the prompt, padding included.
            limit: most tokens generated; None: no end token is forced.
        """
        chain: list[Processor] = []
        if self.banned_sequences:
            chain.append(BannedSequences(self.banned_sequences))
        if self.banned_first_ids:
            chain.append(BannedIds(self.banned_first_ids, prompt_length, prompt_length + 1))
        if self.forced_bos_id is not None:
            chain.append(ForcedAt(self.forced_bos_id, prompt_length))
        if self.forced_eos_id is not None and limit is not None:
            chain.append(ForcedAt(self.forced_eos_id, prompt_length + limit - 1))
        return chain

    def lines(self) -> list[str]:
        """Return the settings for a person, one short line each."""
        named = {
            "starts with": self.decoder_start_id,
            "ends with": self.eos_ids or None,
            "always first": self.forced_bos_id,
            "last at the greatest length": self.forced_eos_id,
            "never": self.banned_ids or None,
            "never first": self.banned_first_ids or None,
            "never in a row": self.banned_sequences or None,
            "longest": self.max_length,
            "shortest": self.min_length or None,
        }
        shown = [f"{name} {_shown(value)}" for name, value in named.items() if value is not None]
        shown += [f"{name} {value}" for name, value in self.options.items()]
        shown += ["early stopping of beam search"] if self.early_stopping else []
        shown += [f"task {name}: {prefix}" for name, prefix in self.task_prefixes.items()]
        return [*shown, *(f"not supported: {key}" for key in self.unsupported)]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _id(settings: Mapping[str, Any], key: str, faults: list[str]) -> int | None:
    value = settings.get(key)
    if value is None or _is_id(value):
        return value
    # Some files write an id as a list of one element.
    if isinstance(value, Sequence) and len(value) and _is_id(value[0]):
        return int(value[0])
    faults.append(f"{key} must be a number from 0, not {value!r}")
    return None


def _ids(settings: Mapping[str, Any], key: str, faults: list[str]) -> tuple[int, ...]:
    value = settings.get(key)
    if value is None:
        return ()
    found = [value] if isinstance(value, int) else value
    if not isinstance(found, list) or not all(map(_is_id, found)):
        faults.append(f"{key} must be an id or a list of ids, not {value!r}")
        return ()
    return tuple(found)


def _sequences(settings: Mapping[str, Any], key: str, faults: list[str]) -> list[tuple[int, ...]]:
    value = settings.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(ids, list) and ids and all(map(_is_id, ids)) for ids in value):
        faults.append(f"{key} must be a list of lists of ids, not {value!r}")
        return []
    return [tuple(ids) for ids in value]


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default options; those of sampling only if the settings turn sampling on."""
    found = {_OPTIONS[key]: settings[key] for key in _OPTIONS if settings.get(key) is not None}
    samples = settings.get("do_sample") is True and found.get("beam_size", 1) == 1
    if samples:
        found.setdefault("temperature", 1.0)
        return found
    contrasts = found.get("penalty_alpha", 0) > 0
    kept = ("top_k",) if contrasts else ()
    return {name: value for name, value in found.items() if name not in _SAMPLING or name in kept}


def _unsupported(settings: Mapping[str, Any], lasts: tuple[int, ...]) -> tuple[str, ...]:
    faults = [key for key, idle in _UNSUPPORTED.items() if settings.get(key) not in (None, *idle, [], {})]
    if settings.get("do_sample") is True and (settings.get("num_beams") or 1) > 1:
        faults.append("do_sample together with num_beams")
    if len(lasts) > 1:
        faults.append("several values of forced_eos_token_id")
    return tuple(faults)


def _shown(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    most = 8
    shown = ", ".join(_shown(part) for part in value[:most])
    return f"{shown} and {len(value) - most} more" if len(value) > most else shown
