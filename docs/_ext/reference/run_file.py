"""Every key of a run file with its type, range, default and effect, from the types that check it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from sphinx.errors import SphinxError

from clearhead.data.sources.run_file_tables import RunFileSection
from clearhead.data.task_tables import DataSection, TaskSection, data_of
from clearhead.spec.presets.hyperparameters import Hyperparameters
from clearhead.spec.tasks.registry import task_kinds
from clearhead.training.runfile.sections import (
    EarlyStop,
    Lora,
    ModelSection,
    TokenizerSection,
    Train,
    fill_defaults,
    run_file_type,
)
from reference.fields import comments, type_words, value_words

Tables = Mapping[str, Mapping[str, Any]]
# What the defaults that are left open may depend on: one key of a table, with the values that are tried.
DECIDERS: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("train", "schedule"): ("paper", "inverse-sqrt", "cosine", "linear", "wsd", "plateau", "constant"),
    ("tokenizer", "kind"): ("bpe", "byte-bpe", "unigram", "wordpiece", "word", "character", "byte", "split"),
    ("tokenizer", "joint"): (True, False),
    ("model", "family"): ("encoder", "decoder", "encoder-decoder"),
    ("task", "noise"): ("spans", "infill"),
    ("data", "stream"): (False, True),
}


def lines(_argument: str) -> Iterator[str]:
    """Yield the whole reference of the run file."""
    yield from ("## [task]", "", "What every task has:", "")
    yield from _keys("task", TaskSection, TaskSection.model_fields)
    for kind in task_kinds():
        own = {
            key: field for key, field in data_of(kind).task.model_fields.items() if key not in TaskSection.model_fields
        }
        if own:
            yield from (f"### `{kind}`", "")
            yield from _keys("task", data_of(kind).task, own, kind)
    yield from ("## [data]", "", "What every task has:", "")
    yield from _keys("data", DataSection, DataSection.model_fields)
    yield from _forms()
    sections = {"tokenizer": TokenizerSection, "model": ModelSection, "lora": Lora, "train": Train}
    for name, section in sections.items():
        yield from (f"## [{name}]", "")
        yield from _keys(name, section, section.model_fields)
    yield from (
        "### early_stop",
        "",
        'A table inside `[train]`: `early_stop = { metric = "bleu", patience = 10 }`.',
        "",
    )
    yield from _keys("train", EarlyStop, EarlyStop.model_fields, prefix="early_stop.")


def _forms() -> Iterator[str]:
    """Yield the keys and forms that [data] has for some tasks, each with those."""
    keys: dict[type[RunFileSection], list[str]] = {}
    forms: dict[type[RunFileSection], list[str]] = {}
    for kind in task_kinds():
        data = data_of(kind)
        owner = next(base for base in data.data.__mro__ if "model_fields" in dir(base) and base.__annotations__)
        if owner is not DataSection:
            keys.setdefault(owner, []).append(kind)
        for form in data.forms:
            forms.setdefault(form, []).append(kind)
    for section, tasks in keys.items():
        own = {key: field for key, field in section.model_fields.items() if key not in DataSection.model_fields}
        yield from (f"### {', '.join(f'`{task}`' for task in tasks)}", "")
        yield from _keys("data", section, own, tasks[0])
    yield from ("### What names data", "", "The tables `train` and `valid` have one of these forms.", "")
    for form, tasks in forms.items():
        yield from (f"#### {form.__doc__}", "", f"For {', '.join(f'`{task}`' for task in tasks)}.", "")
        yield from _keys("data", form, form.model_fields, tasks[0], prefix="train.")


def _keys(
    table: str, section: type[RunFileSection], fields: Mapping[str, FieldInfo], kind: str = "", prefix: str = ""
) -> Iterator[str]:
    # The keys of [model] that change a preset are made from its hyperparameters.
    effects = comments(Hyperparameters) | comments(section) if section is ModelSection else comments(section)
    for key, field in fields.items():
        if key not in effects:
            raise SphinxError(f"{section.__name__}.{key} has no comment '#: ...' that says what it does")
        default = _default(table, key, field, kind) if not prefix else _plain_default(field)
        yield from (f"`{key}`", f": {type_words(field)} · {default}", "", f"  {effects[key]}", "")


def _plain_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "optional" if field.default is None else f"default {value_words(field.default)}"


def _default(table: str, key: str, field: FieldInfo, kind: str) -> str:
    """Return the default of a key; where it depends on others, on which, by trying them."""
    if field.is_required() or field.default is not None:
        return _plain_default(field)
    choices: dict[object, list[str]] = {}
    for name in [kind] if kind else task_kinds():
        choices.setdefault(_filled(name, {}, table, key), []).append(f"`{name}`")
    if len(choices) > 1:
        return _by(choices)
    for (owner, decider), values in DECIDERS.items():
        found: dict[object, list[str]] = {}
        for value in values:
            try:
                result = _filled(kind or "translate", {owner: {decider: value}}, table, key)
            except ValueError:
                break
            found.setdefault(result, []).append(value_words(value))
        if len(found) > 1:
            return _by(found, f"{decider} ")
    (only,) = choices
    return "optional" if only is None else f"default {value_words(only)}"


def _by(choices: Mapping[object, list[str]], decider: str = "") -> str:
    parts = [
        f"{'none' if value is None else value_words(value)} ({decider}{', '.join(names)})"
        for value, names in choices.items()
    ]
    return f"default {'; '.join(parts)}"


def _filled(kind: str, changes: Tables, table: str, key: str) -> object:
    """Return the value that a run file of a kind of task has for a key that it leaves open."""
    named = data_of(kind).forms[0].example()
    tables: dict[str, dict[str, Any]] = {
        "task": {"kind": kind},
        "data": {"train": named, "valid": named},
        "tokenizer": {"kind": "bpe"},
        "model": {},
        "train": {"run": "runs/one", "steps": 10_000},
    }
    for name, values in changes.items():
        tables[name] |= values
    return getattr(getattr(fill_defaults(run_file_type(kind).model_validate(tables)), table), key, None)
