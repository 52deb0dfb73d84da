"""config.json read by a record, every key accounted for, and written back from a spec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead import spec
from clearhead.errors import InputError, nearest
from clearhead.hf.mapping.family import Address, Family, Fixed, Key, Values, Variant

# Keys that every class knows and that change nothing here: they name files, steer search (which has its own record of
# them) or memory, or say how the model was once trained.
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels architectures
    attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward custom_pipelines
    decoder_start_token_id directionality diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_range is_encoder_decoder label2id language layerdrop length_penalty
    max_length min_length model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_scores pad_token_id prefix
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_token_id use_bfloat16 use_cache
    """.split()
)

# Keys that every class knows and that would change what is computed.
EVERYWHERE = (
    Fixed("quantization_config", (None,), "the weights are quantised, in a format that is not read here"),
    Fixed("auto_map", (None,), "the model brings code of its own, which is never run here"),
    Fixed("per_layer_config", (None, {}), "single layers would differ from the rest"),
    Fixed("is_decoder", (False,), "an encoder would see the past alone"),
    Fixed("add_cross_attention", (False,), "a decoder would attend to a second model"),
    Fixed("cross_attention_hidden_size", (None,), "a decoder would attend to a second model"),
    Fixed("tie_encoder_decoder", (False,), "the two stacks would be one"),
    Fixed("pruned_heads", (None, {}), "some heads are missing from the tensors"),
)


MOST_SHOWN = 12


class NotExpressible(InputError):
    """A family's config cannot say a spec.

    Args:
        message: the report.
        num_differences: how much it would say otherwise; None: what it needs does not even fit together.
    """

    def __init__(self, message: str, num_differences: int | None) -> None:
        super().__init__(message)
        self.num_differences = num_differences

    @classmethod
    def of(cls, faults: Sequence[str], num_differences: int | None, subject: str) -> NotExpressible:
        """Make one report of all faults."""
        return cls(str(InputError.from_faults(list(faults), subject=subject)), num_differences)


class DifferentStacks(NotExpressible):
    """A family has an encoder or a decoder where a spec has none, or the other way round."""


@dataclass(frozen=True)
class ParsedConfig:
    """What a config says to a record: the values that parsed, and every fault."""

    values: Values
    faults: tuple[str, ...]


def parse(record: Family, config: Mapping[str, Any]) -> ParsedConfig:
    """Account for every key of a config: honoured, without effect, or a fault."""
    faults: list[str] = []
    values: dict[str, Any] = {}
    known = set(record.inert) | INERT
    for key in record.keys:
        known |= {key.name, *key.aliases}
        values[key.name] = _value(key, config, faults)
    only = {one.name: one for one in (*EVERYWHERE, *record.only)}
    for name in (name for name in config if name not in known):
        one = only.get(name)
        if one is None:
            hint = nearest(name, known | set(only))
            faults.append(f"config.json: '{name}' is not known to {record.model_type}, so it cannot be honoured{hint}")
        elif config[name] not in one.values:
            shown, expected = _shown(config[name]), " or ".join(map(_shown, one.values))
            faults.append(f"config.json: {name} = {shown} is not supported ({one.otherwise}); only {expected} is")
    return ParsedConfig(Values(values, num_labels(config)), tuple(faults))


def num_labels(config: Mapping[str, Any]) -> int:
    """How many labels a config counts; two where it says nothing, as its classes have it."""
    names = config.get("id2label")
    if isinstance(names, dict):
        return len(names)
    count = config.get("num_labels", 2)
    return count if isinstance(count, int) and count > 0 else 2


def _shown(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    return text or (str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}...")


def _value(key: Key, config: Mapping[str, Any], faults: list[str]) -> Any:
    given = [config[name] for name in (key.name, *key.aliases) if name in config]
    if not given:
        return key.names[key.default] if key.names and key.default is not None else key.default
    value = given[0]
    if any(other != value for other in given[1:]):
        faults.append(f"config.json: {key.name} is given twice, as {' and '.join(map(_shown, given))}")
    kind = type(key.default) if key.kind is None else key.kind
    if value is None and (key.default is None or key.is_nullable):
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", dict: "an object"}
        faults.append(f"config.json: {key.name} must be {words.get(kind, 'a list')}, got {_shown(value)}")
        return key.default
    if key.names is not None:
        word = str(value)
        if word not in key.names:
            hint = nearest(word, key.names)
            faults.append(f"config.json: {key.name} = '{word}' is none of {', '.join(key.names)}{hint}")
        return key.names.get(word)
    return value


def value_at(model: spec.Model, address: Address) -> Any:
    """Return what stands at an address of a spec.

    Raises:
        LookupError: the spec has no such place.
    """
    if callable(address):
        try:
            return address(model)
        except (AssertionError, AttributeError, IndexError, TypeError) as error:
            raise LookupError(str(error)) from None
    value: Any = model
    for part in address.replace("{layer}", "0").split("."):
        try:
            value = value[int(part)] if part.lstrip("-").isdigit() else getattr(value, part)
        except (AttributeError, IndexError, TypeError) as error:
            raise LookupError(str(error)) from None
    return value


def to_config(record: Family, variant: Variant, model: spec.Model) -> dict[str, Any]:
    """Write the config that says a spec, and prove it by reading it again.

    Raises:
        InputError: the family cannot say the spec; the report names what came back otherwise.
    """
    config: dict[str, Any] = {"architectures": [variant.classes[0]], "model_type": record.model_type, **record.written}
    labels = num_outputs(model)
    if variant.task in ("classify", "tag") and labels is not None:
        config["id2label"] = {str(index): f"LABEL_{index}" for index in range(labels)}
        config["label2id"] = {name: int(index) for index, name in config["id2label"].items()}
    # Whether words and outputs share a table is a question only where outputs are words.
    silent = () if variant.output else ("tie_word_embeddings",)
    for key in (key for key in record.keys if key.name not in silent):
        try:
            value = value_at(model, key.at) if key.at is not None else None
        except LookupError:
            continue
        if key.names is not None:
            value = next((theirs for theirs, ours in key.names.items() if ours == value), None)
        if value is not None or (key.at is not None and (key.default is None or key.is_nullable)):
            config[key.name] = value
    reading = parse(record, config)
    subject = f"saving as {record.model_type}"
    if reading.faults:
        raise NotExpressible.of(_shortened(reading.faults), None, subject)
    said = record.parts(reading.values, variant)
    for name in ("encoder", "decoder"):
        has, can = (getattr(one, name) is not None for one in (model, said))
        if has != can:
            # What has other stacks differs everywhere, which need not be written out.
            raise DifferentStacks.of([f"{name}: this model has {'one' if has else 'none'}"], None, subject)
    faults = differences(said, model)
    if faults:
        raise NotExpressible.of(_shortened(faults), len(faults), subject)
    return config


def _shortened(faults: Sequence[str]) -> list[str]:
    more = len(faults) - MOST_SHOWN
    return [*faults[:MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def num_outputs(model: spec.Model) -> int | None:
    """How many outputs the last map of a head has; None without one."""
    maps = [one for one in (model.head.layers if model.head else ()) if isinstance(one, spec.Linear)]
    return maps[-1].size if maps else None


def differences(said: spec.Model, meant: spec.Model) -> list[str]:
    """List where two specs differ in what they compute, in sentences; how fresh weights are drawn does not count."""
    first, second = _flat(said), _flat(meant)
    return [
        f"{path}: this model has {_shown(second.get(path))}, the format can only say {_shown(first.get(path))}"
        for path in sorted(first.keys() | second.keys())
        if not _same(first.get(path), second.get(path))
    ]


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-12)
    return bool(first == second)


def _flat(model: spec.Model) -> dict[str, Any]:
    found = {}
    for path, node in spec.walk(model):
        for name in type(node).model_fields:
            value = getattr(node, name)
            if name == "initialization" or path == "initialization":
                continue
            if isinstance(node, spec.Attention) and name == "scale" and value is None:
                value = node.head_size**-0.5
            if isinstance(value, spec.Node) or (
                isinstance(value, tuple) and any(isinstance(v, spec.Node) for v in value)
            ):
                continue
            found[f"{path}.{name}" if path else name] = value
    return found
