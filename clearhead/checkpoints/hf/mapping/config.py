"""Parsing of config.json by a family, with a check of every key, and writing of a config from a spec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead import spec
from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.files import convert_json
from clearhead.checkpoints.hf.mapping.family import Address, Family, Fixed, Key, Values, Variant
from clearhead.spec.tasks.registry import find_task

# Keys of all classes that do not change the spec: they name files, configure generation (read by hf/generation.py) or
# memory use, or describe the training.
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

# Keys of all classes that would change the computation.
FIXED_EVERYWHERE = (
    Fixed("quantization_config", (None,), "this quantization is not supported"),
    Fixed("auto_map", (None,), "code that comes with a checkpoint is never run"),
    Fixed("per_layer_config", (None, {}), "settings of single layers are not supported"),
    Fixed("is_decoder", (False,), "an encoder with causal attention is not supported"),
    Fixed("add_cross_attention", (False,), "cross-attention to a second model is not supported"),
    Fixed("cross_attention_hidden_size", (None,), "cross-attention to a second model is not supported"),
    Fixed("tie_encoder_decoder", (False,), "an encoder and a decoder with the same weights are not supported"),
    Fixed("pruned_heads", (None, {}), "pruned heads are not supported"),
)
_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


class NotExpressible(InputError):
    """Error: no config of the family describes the spec.

    Attributes:
        expressed: the nearest spec that the family can express. None means that there is none.
    """

    expressed: spec.Model | None = None

    @classmethod
    def of(cls, faults: Sequence[str], subject: str, expressed: spec.Model | None = None) -> NotExpressible:
        """Return one error that lists all reasons why a spec cannot be saved."""
        error = cls(*InputError.from_faults(faults, subject=subject).lines)
        error.expressed = expressed
        return error


class DifferentStacks(NotExpressible):
    """Error: the family has an encoder or a decoder that the spec lacks, or lacks one that the spec has."""


@dataclass(frozen=True)
class ParsedConfig:
    """Values of a family's keys in a config, and all faults of the config."""

    values: Values
    faults: tuple[str, ...]


def parse(family: Family, config: Mapping[str, Any]) -> ParsedConfig:
    """Parse config.json into values of the family's keys, and report each unsupported key or value as a fault."""
    faults: list[str] = []
    values: dict[str, Any] = {}
    known = set(family.inert) | INERT
    for key in family.keys:
        known |= {key.name, *key.aliases}
        values[key.name] = _value(key, config, faults)
    fixed = {entry.name: entry for entry in (*FIXED_EVERYWHERE, *family.fixed)}
    for name in (name for name in config if name not in known):
        fixed_key = fixed.get(name)
        if fixed_key is None:
            hint = did_you_mean(name, known | set(fixed))
            faults.append(f"config.json: {family.model_type} has no key '{name}', so it is not supported{hint}")
        elif config[name] not in fixed_key.values:
            expected = " or ".join(map(format_value, fixed_key.values))
            faults.append(
                f"config.json: {name} = {format_value(config[name])} ({fixed_key.reason}); expected {expected}"
            )
    return ParsedConfig(Values(values, num_labels(config)), tuple(faults))


def label_names(names: Sequence[str]) -> dict[str, Any]:
    """Return the config keys that name labels: `id2label` and `label2id`."""
    label2id = {name: index for index, name in enumerate(names)}
    return {"id2label": {str(index): name for index, name in enumerate(names)}, "label2id": label2id}


def num_labels(config: Mapping[str, Any]) -> int:
    """Return the number of labels of a config; 2, the default of transformers, if it names none."""
    names = config.get("id2label")
    if isinstance(names, dict):
        return len(names)
    count = config.get("num_labels", 2)
    return count if isinstance(count, int) and count > 0 else 2


def format_value(value: Any) -> str:
    """Return a config value as a short text in JSON's spelling."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    return text or (str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}...")


def _value(key: Key, config: Mapping[str, Any], faults: list[str]) -> Any:
    present = [config[name] for name in (key.name, *key.aliases) if name in config]
    if not present:
        return key.names[key.default] if key.names and key.default is not None else key.default
    value = present[0]
    if any(other != value for other in present[1:]):
        faults.append(f"config.json: {key.name} has two values, {' and '.join(map(format_value, present))}")
    kind = type(key.default) if key.kind is None else key.kind
    if value is None and (key.default is None or key.is_nullable):
        return None
    if kind not in _KINDS:
        try:
            convert_json(value, kind, name=f"config.json: {key.name}")
        except InputError as error:
            first, *rest = f"{error}".split("\n")
            faults += [line.removeprefix("  - ") for line in rest] or [first]
            return key.default
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        faults.append(f"config.json: {key.name} must be {_KINDS[kind]}, got {format_value(value)}")
        return key.default
    if kind is int and isinstance(value, int) and not key.least <= value <= key.most:
        faults.append(
            f"config.json: {key.name} = {format_value(value)} is out of range; expected {key.least} to {key.most}"
        )
        return key.default
    if key.names is not None:
        name = str(value)
        if name not in key.names:
            known, hint = ", ".join(key.names), did_you_mean(name, key.names)
            faults.append(f"config.json: {key.name} = '{name}' is not supported; expected one of {known}{hint}")
        return key.names.get(name)
    return value


def value_at(model: spec.Model, address: Address) -> Any:
    """Return the value at an address of a spec, such as `decoder.width`.

    Raises:
        LookupError: the spec has no such address.
    """
    try:
        if callable(address):
            return address(model)
        value: Any = model
        for segment in address.replace("{layer}", "0").split("."):
            value = value[int(segment)] if segment.lstrip("-").isdigit() else getattr(value, segment)
        return value
    except (AssertionError, AttributeError, IndexError, TypeError) as error:
        raise LookupError(str(error)) from None


def config_values(keys: Sequence[Key], model: spec.Model) -> dict[str, Any]:
    """Return the config values of keys for a spec, without keys that have no value in the spec."""
    values = {}
    for key in keys:
        try:
            value = value_at(model, key.address) if key.address is not None else None
        except LookupError:
            continue
        if key.names is not None:
            value = next((theirs for theirs, ours in key.names.items() if ours == value), None)
        if value is not None or (key.address is not None and (key.default is None or key.is_nullable)):
            values[key.name] = value
    return values


def to_config(family: Family, variant: Variant, model: spec.Model) -> dict[str, Any]:
    """Return the config that expresses a spec, after a check that parsing it gives the same spec.

    Raises:
        InputError: the family cannot express the spec; the report names the differences.
    """
    config: dict[str, Any] = {
        "architectures": [variant.classes[0]],
        "model_type": family.model_type,
        **family.written_keys,
    }
    if find_task(variant.task).has_labels and model.num_outputs is not None:
        config |= label_names([f"LABEL_{index}" for index in range(model.num_outputs)])
    # Only outputs that score the vocabulary can be tied.
    left_out = () if variant.output else ("tie_word_embeddings",)
    config |= config_values([key for key in family.keys if key.name not in left_out], model)
    parsed = parse(family, config)
    subject = f"saving as {family.model_type}"
    if parsed.faults:
        raise NotExpressible.of(parsed.faults, subject)
    expressed = family.build_unvalidated_spec(parsed.values, variant)
    for name in ("encoder", "decoder"):
        has, can = (getattr(spec_model, name) is not None for spec_model in (model, expressed))
        if has != can:
            # Do not list the fields of a stack that exists on one side only.
            raise DifferentStacks.of(
                [f"{name}: this model has {'one, the family has none' if has else 'none, the family has one'}"], subject
            )
    faults = differences(expressed, model)
    if faults:
        raise NotExpressible.of(faults, subject, expressed)
    return config


def differences(expressed: spec.Model, meant: spec.Model) -> list[str]:
    """Return one sentence per difference in the computation of two specs; initialization does not count."""
    return [
        f"{path}: this model has {format_value(ours)}, the format can only express {format_value(theirs)}"
        for path, (theirs, ours) in differing_fields(expressed, meant).items()
    ]


def differing_fields(first: spec.Model, second: spec.Model) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which the computations of two specs differ: both values by path."""
    first_fields, second_fields = _flat(first), _flat(second)
    pairs = {
        path: (first_fields.get(path), second_fields.get(path))
        for path in sorted(first_fields.keys() | second_fields.keys())
    }
    return {path: pair for path, pair in pairs.items() if not _is_same(*pair)}


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-12)
    return bool(first == second)


def _flat(model: spec.Model) -> dict[str, Any]:
    fields = {}
    for path, node in spec.walk(model):
        for name, value in node:
            if name in ("initialization", "declared_length") or path == "initialization":
                continue
            if isinstance(node, spec.Attention) and name == "scale" and value is None:
                value = node.head_size**-0.5
            if not any(isinstance(item, spec.Node) for item in (value if isinstance(value, tuple) else (value,))):
                fields[f"{path}.{name}" if path else name] = value
    return fields
