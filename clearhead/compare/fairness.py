"""Whether runs may be compared: what is the same for all of them, and one sentence for everything that is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clearhead.compare.runs import Quality, Run
from clearhead.compare.table import Row
from clearhead.runs.directory import differing_keys

TOKENS_TOLERANCE: Final = 1.01
"""Batches of one budget hold a few tokens more or less."""

# Tasks whose loss is a mean over tokens, so that a vocabulary with longer entries has the higher loss.
_TOKEN_TASKS: Final = ("translate", "generate", "fill", "denoise")
# Where a run starts is said by itself, how states become one is the model's affair, and the temperature spoils less.
_NO_OBJECTIVE: Final = ("task.init", "task.pool", "task.temperature")
_PLACE_KEYS: Final = ("epoch", "batch")
_DATA: Final = "data"
_MACHINE: Final[Mapping[str, str]] = {
    "accelerator": "accelerator",
    "processor features": "processor",
    "threads": "threads",
    "precision": "precision",
}


@dataclass(frozen=True)
class Fairness:
    """What a comparison rests on.

    Attributes:
        same: what was checked and is the same for all rows.
        unfair: one sentence for each unfairness.
        notes: one sentence for everything else that a reader must know of a run.
        losses: names of the rows whose loss cannot be compared with that of the first row.
        scores: names of the rows whose score cannot be compared with that of the first row.
    """

    same: tuple[str, ...]
    unfair: tuple[str, ...]
    notes: tuple[str, ...]
    losses: frozenset[str]
    scores: frozenset[str]

    def incomparable(self, quality: Quality) -> frozenset[str]:
        """Return the names of the rows whose loss or score cannot be compared with that of the first row."""
        return self.losses if quality == "loss" else self.scores


@dataclass(frozen=True)
class _Check:
    """One thing that should be the same.

    Attributes:
        name: what is compared, for the list of what is the same.
        same: whether it is the same for a run and the first one; None where nothing tells.
        clause: what to say of a run and the first row's name where it is not.
        spoils: what of validation cannot be compared then.
    """

    name: str
    same: Callable[[Run, Run], bool | None]
    clause: Callable[[Run, Run, str], str]
    spoils: tuple[Quality, ...] = ()


def judge_fairness(rows: Sequence[Row]) -> Fairness:
    """Hold every row against the first one.

    Args:
        rows: at least one.
    """
    reference, same = rows[0], list[str]()
    unfair: list[tuple[str, str]] = []
    spoiled: dict[Quality, set[str]] = {"loss": set(), "score": set()}
    for check in _checks(reference.first):
        found = []
        for row in rows:
            others = [run for run in row.runs if check.same(run, reference.first) is False]
            if others:
                name = row.name if len(others) == len(row.runs) else str(others[0].path)
                found.append((name, check.clause(others[0], reference.first, reference.name)))
                for quality in check.spoils:
                    spoiled[quality].add(row.name)
        unfair += found
        known = all(check.same(run, reference.first) is not None for row in rows for run in row.runs)
        same += [check.name] if known and not found else []
    for name, found in (("seeds", _seeds(rows)), ("tokens", _tokens(rows))):
        unfair += found
        same += [] if found else [name]
    return Fairness(
        same=tuple(same) if sum(len(row.runs) for row in rows) > 1 else (),
        unfair=_sentences(unfair),
        notes=_sentences([note for row in rows for note in _notes(row)]),
        losses=frozenset(spoiled["loss"]),
        scores=frozenset(spoiled["score"]),
    )


def _sentences(found: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Join names and what is said of them; what is said of several is said once."""
    names: dict[str, list[str]] = {}
    for name, clause in found:
        names.setdefault(clause, []).append(name)
    return tuple(f"{_joined(who)} {clause}" for clause, who in names.items())


def _joined(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), names[-1]])


def _checks(reference: Run) -> list[_Check]:
    checks = [
        _Check("training data", _same_data, lambda run, first, name: f"had other training data than {name}"),
        _Check(
            "validation data",
            _same_validation,
            lambda run, first, name: f"had other validation data than {name}{_values(run, first, _VALIDATION_KEYS)}",
            spoils=("loss", "score"),
        ),
        _Check("tokenizer", _same_tokenizer, _tokenizer_clause, ("loss",) if reference.task in _TOKEN_TASKS else ()),
        _Check("objective", _same_objective, _objective_clause, spoils=("loss", "score")),
        _Check(
            "score",
            lambda run, first: run.score_name == first.score_name,
            lambda run, first, name: f"took {run.score_name} for the score, {name} {first.score_name}",
            spoils=("score",),
        ),
        _Check("order", _same_order, _order_clause),
        _Check(
            "budget",
            _same_budget,
            lambda run, first, name: f"had a budget of {_budget(run)}, {name} of {_budget(first)}",
        ),
        _Check("starting point", lambda run, first: run.key("task.init") == first.key("task.init"), _start_clause),
        _Check("machine", _same_machine, _machine_clause),
    ]
    if reference.task == "embed":
        checks.append(_Check("temperature", _same_temperature, _temperature_clause, spoils=("loss",)))
    return checks


# --- data, tokenizer, objective -------------------------------------------------------------------------------


def _batches(run: Run) -> Mapping[str, Any]:
    return run.state["batches"] if run.state is not None else {}


def _same_tokenizer(run: Run, first: Run) -> bool | None:
    one, two = run.choices.get("tokenizer"), first.choices.get("tokenizer")
    return None if one is None or two is None else bool(one == two)


def _same_data(run: Run, first: Run) -> bool | None:
    """Compare what was read; token ids tell nothing of text under two tokenizers, where only the run files can say."""
    one, two = _batches(run).get(_DATA), _batches(first).get(_DATA)
    if one is not None and two is not None and _same_tokenizer(run, first):
        return bool(one == two)
    return not _differing(run, first, "data.train")


_VALIDATION_KEYS: Final = ("data.valid", "data.max_length", "data.max_ratio")


def _same_validation(run: Run, first: Run) -> bool | None:
    one, two = run.choices.get("valid_data"), first.choices.get("valid_data")
    if one is not None and two is not None and _same_tokenizer(run, first):
        return bool(one == two)
    return not any(_differing(run, first, key) for key in _VALIDATION_KEYS)


def _objective_keys(run: Run, first: Run) -> list[str]:
    return [key for key in _differing(run, first, "task") if key not in _NO_OBJECTIVE]


def _same_objective(run: Run, first: Run) -> bool:
    return not _objective_keys(run, first)


def _objective_clause(run: Run, first: Run, name: str) -> str:
    return f"learned another objective than {name}{_values(run, first, _objective_keys(run, first))}"


def _tokenizer_clause(run: Run, first: Run, name: str) -> str:
    clause = f"used another tokenizer than {name}"
    if run.task not in _TOKEN_TASKS:
        return clause
    return f"{clause}, so losses per token cannot be compared; scores and bits per byte could"


def _same_temperature(run: Run, first: Run) -> bool:
    return bool(run.key("task.temperature") == first.key("task.temperature"))


def _temperature_clause(run: Run, first: Run, name: str) -> str:
    values = _values(run, first, ["task.temperature"])
    return f"divided by another temperature than {name}{values}, so losses cannot be compared"


# --- order, budget, start, machine ----------------------------------------------------------------------------


def _same_order(run: Run, first: Run) -> bool | None:
    """Compare how batches are cut and shuffled, seeds apart: those are compared row by row."""
    if not _batches(run) or not _batches(first):
        return None
    return not _order_keys(run, first)


def _order_keys(run: Run, first: Run) -> list[str]:
    ignored = {*_PLACE_KEYS, _DATA, "seed"}
    return [key for key in differing_keys(_batches(run), _batches(first)) if key.split(".")[0] not in ignored]


def _order_clause(run: Run, first: Run, name: str) -> str:
    ours, theirs = _batches(run), _batches(first)
    shown = [f"{key} {_shown(ours.get(key))}, not {_shown(theirs.get(key))}" for key in _order_keys(run, first)]
    return f"read batches in another order than {name} ({'; '.join(shown[:3])})"


def _same_budget(run: Run, first: Run) -> bool:
    return _budget(run) == _budget(first)


def _budget(run: Run) -> str:
    """Say what ends a run."""
    limits = {name: run.key(f"train.{name}") for name in ("steps", "epochs", "seconds")}
    words = [
        f"{_count(value)} {name if value != 1 else name[:-1]}" for name, value in limits.items() if value is not None
    ]
    patience = run.key("train.early_stop.patience")
    words += [f"a patience of {patience}"] if patience is not None else []
    return " or ".join(words) or "no limit"


def _count(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _start_clause(run: Run, first: Run, name: str) -> str:
    ours, theirs = run.key("task.init"), first.key("task.init")
    if not ours:
        return f"started from scratch, {name} from {theirs}, whose training is not counted here"
    return f"started from {ours}, whose training is not counted here, {name} from {theirs or 'scratch'}"


def _machine(run: Run) -> dict[str, Any]:
    values = {**(run.state["environment"] if run.state is not None else {}), **run.choices}
    return {word: values[key] for key, word in _MACHINE.items() if key in values}


def _same_machine(run: Run, first: Run) -> bool | None:
    ours, theirs = _machine(run), _machine(first)
    return ours == theirs if ours and theirs else None


def _machine_clause(run: Run, first: Run, name: str) -> str:
    ours, theirs = _machine(run), _machine(first)
    shown = [
        f"{word} {_shown(ours.get(word))} instead of {_shown(theirs.get(word))}"
        for word in differing_keys(ours, theirs)
    ]
    return f"ran with {', and '.join(shown)}, so seconds cannot be compared with {name}"


# --- what is seen row by row ----------------------------------------------------------------------------------


def _seeds(rows: Sequence[Row]) -> list[tuple[str, str]]:
    first = rows[0]
    return [
        (row.name, f"had {_seed_list(row)}, {first.name} {_seed_list(first)}")
        for row in rows
        if row.seeds != first.seeds
    ]


def _seed_list(row: Row) -> str:
    return f"the seed{'s' if len(row.seeds) > 1 else ''} {', '.join(map(str, row.seeds))}"


def _tokens(rows: Sequence[Row]) -> list[tuple[str, str]]:
    first, found = rows[0], []
    for row in rows[1:]:
        if min(first.tokens.mean, row.tokens.mean) <= 0:
            continue
        ratio = row.tokens.mean / first.tokens.mean
        if max(ratio, 1 / ratio) > TOKENS_TOLERANCE:
            found.append((row.name, f"saw {_ratio(ratio)} x the tokens of {first.name}"))
    return found


def _ratio(value: float) -> str:
    return (
        f"{value:.2g}" if value < 0.1 else f"{value:,.0f}" if value >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")
    )


def _notes(row: Row) -> list[tuple[str, str]]:
    """Say what a reader must know of a row by itself."""
    found = []
    for run in row.runs:
        who = str(run.path)
        if run.state is None:
            found.append((who, "had no sound checkpoint, so data, tokenizer and order are not checked"))
        elif run.work is None:
            found.append((who, "kept no record of the lengths of texts, so the FLOPs are not known"))
        if run.unfinished is not None:
            found.append((who, f"reached {run.unfinished}: still in training, or interrupted"))
        if run.best("loss") is None:
            found.append((who, "had no validation yet"))
    twice = sorted({seed for seed in row.seeds if row.seeds.count(seed) > 1})
    if twice:
        who = _joined([str(run.path) for run in row.runs if run.seed == twice[0]])
        found.append((who, f"had one configuration and one seed, so the spread of {row.name} is too small"))
    return found


# --- words ----------------------------------------------------------------------------------------------------


def _differing(run: Run, first: Run, prefix: str) -> list[str]:
    """Return the keys of the run files at or below a dotted key whose values differ."""
    keys = differing_keys(run.configuration, first.configuration)
    return [key for key in keys if key == prefix or key.startswith(f"{prefix}.")]


def _values(run: Run, first: Run, prefixes: Sequence[str]) -> str:
    """Say the first keys that differ, with both values; nothing where the run files are the same."""
    keys = [key for prefix in prefixes for key in _differing(run, first, prefix)]
    shown = [f"{key} {_shown(run.key(key))}, not {_shown(first.key(key))}" for key in keys[:3]]
    return f" ({'; '.join(shown)})" if shown else ""


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
