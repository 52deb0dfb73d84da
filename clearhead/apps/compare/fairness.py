"""Judge whether runs are compared fairly: list the properties that are equal, and each unfair difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from clearhead.apps.compare.runs import ComparedRun, Quality
from clearhead.apps.compare.table import ComparisonRow
from clearhead.base.printing import Printed
from clearhead.checkpoints.runs.directory import differing_keys
from clearhead.checkpoints.runs.metrics import FILE_NAME, find_damaged_lines
from clearhead.spec.tasks.registry import find_task

TOKENS_TOLERANCE: Final = 1.01
"""Ratio up to which token counts count as equal: batches of one budget vary by a few tokens."""

SECONDS_TOLERANCE: Final = 1.05
"""Ratio up to which times count as equal: a run finishes its last step and validation after its time is over."""
_AMOUNTS: Final[Mapping[str, tuple[float, str, Callable[[ComparisonRow], float]]]] = {
    "tokens": (TOKENS_TOLERANCE, "saw", lambda row: row.tokens.mean),
    "seconds": (SECONDS_TOLERANCE, "took", lambda row: row.seconds.mean),
    "parameters": (TOKENS_TOLERANCE, "has", lambda row: row.first.parameters.total),
}
# Keys of [task] that are no part of the objective: other checks cover them, or they belong to the model.
_NO_OBJECTIVE: Final = ("task.init", "task.pool", "task.temperature")
_VALIDATION_KEYS: Final = ("data.valid", "data.max_length", "data.max_ratio")
# State of the batches that does not define their order; seeds are compared per row.
_NO_ORDER: Final = ("epoch", "batch", "data", "seed")
_MACHINE: Final[Mapping[str, str]] = {
    "accelerator": "accelerator",
    "processor features": "processor",
    "threads": "threads",
    "precision": "precision",
}


@dataclass(frozen=True, repr=False)
class Fairness(Printed):
    """The result of checking a comparison for unfair differences.

    Attributes:
        same: the names of the checks that all rows pass.
        unfair: one sentence for each unfair difference.
        notes: one sentence for each other fact to know about a run, such as that it is unfinished.
        losses: the names of the rows whose loss cannot be compared with that of the first row.
        scores: the names of the rows whose score cannot be compared with that of the first row.
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
    """A property that should be equal for all runs.

    Attributes:
        name: the name of the property.
        same: function that compares a run with the first one. Its result None means unknown.
        clause: function that describes the difference, given a run, the first run and the name of the first row.
        spoils: the validation numbers that cannot be compared if the property differs.
    """

    name: str
    same: Callable[[ComparedRun, ComparedRun], bool | None]
    clause: Callable[[ComparedRun, ComparedRun, str], str]
    spoils: tuple[Quality, ...] = ()


Amount = Literal["steps", "tokens", "seconds", "parameters"]


def judge_fairness(rows: Sequence[ComparisonRow], *, equal: Amount = "steps", shared_machine: bool = False) -> Fairness:
    """Compare every row with the first one, and list the unfair differences.

    Args:
        rows: the rows, at least one.
        equal: the budget that the runs should share. With equal tokens, steps may differ; with equal seconds, tokens
            may differ; equal parameters also need equal steps.
        shared_machine: True if several runs shared the machine at the same time.
    """
    reference, runs = rows[0], [run for row in rows for run in row.runs]
    same, unfair = list[str](), list[tuple[str, str]]()
    spoiled: dict[Quality, set[str]] = {"loss": set(), "score": set()}
    for check in _checks(reference.first):
        if check.name == "budget" and equal == "tokens":
            continue
        for row in rows:
            difference = _difference(check, row, reference)
            if difference is not None:
                unfair.append(difference)
                for quality in check.spoils:
                    spoiled[quality].add(row.name)
        if all(check.same(run, reference.first) for run in runs):
            same.append(check.name)
    notes = [note for row in rows for note in _notes(row)]
    if shared_machine:
        notes.append(("runs", "that ran at once shared the machine, so seconds and tokens/s cannot be compared"))
    amounts = {"seeds": _seeds(rows), "tokens": _ratios(rows, "tokens")}
    if equal in ("seconds", "parameters"):
        amounts[equal] = _ratios(rows, equal)
    for name, differences in amounts.items():
        if name == "tokens" and equal == "seconds":
            notes += differences
            continue
        unfair += differences
        if not differences:
            same.append(name)
    return Fairness(
        same=tuple(same) if len(runs) > 1 else (),
        unfair=_merge_clauses(unfair),
        notes=_merge_clauses(notes),
        losses=frozenset(spoiled["loss"]),
        scores=frozenset(spoiled["score"]),
    )


def _difference(check: _Check, row: ComparisonRow, reference: ComparisonRow) -> tuple[str, str] | None:
    """Return the name of the row or run that differs and the clause, or None if no difference is known."""
    others = [run for run in row.runs if check.same(run, reference.first) is False]
    if not others:
        return None
    name = row.name if len(others) == len(row.runs) else str(others[0].path)
    return name, check.clause(others[0], reference.first, reference.name)


def _merge_clauses(clauses: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Join names and clauses into sentences; rows with equal clauses share a sentence."""
    names: dict[str, list[str]] = {}
    for name, clause in clauses:
        names.setdefault(clause, []).append(name)
    return tuple(f"{_join_names(group)} {clause}" for clause, group in names.items())


def _join_names(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), names[-1]])


def _checks(reference: ComparedRun) -> Iterator[_Check]:
    yield _Check("training data", _same_training_data, _training_data_clause)
    yield _Check("validation data", _same_validation_data, _validation_data_clause, ("loss", "score"))
    yield _Check("tokenizer", _same_tokenizer, _tokenizer_clause, ("loss",) if _is_loss_per_token(reference) else ())
    yield _Check("objective", _same_objective, _objective_clause, ("loss", "score"))
    yield _Check("score", _same_score, _score_clause, ("score",))
    yield _Check("order", _same_order, _order_clause)
    yield _Check("budget", _same_budget, _budget_clause)
    yield _Check("starting point", _same_start, _start_clause)
    yield _Check("machine", _same_machine, _machine_clause)
    if find_task(reference.task).outputs == "vector":
        yield _Check("temperature", _same_temperature, _temperature_clause, ("loss",))


# --- data, tokenizer, objective -------------------------------------------------------------------------------


def _batches(run: ComparedRun) -> Mapping[str, Any]:
    return run.state["batches"] if run.state is not None else {}


def _is_loss_per_token(run: ComparedRun) -> bool:
    """Return whether the loss is a mean over tokens, so that it depends on the tokenizer."""
    return find_task(run.task).outputs == "vocabulary"


def _same_tokenizer(run: ComparedRun, first: ComparedRun) -> bool | None:
    return _equal_where_known(run.choices.get("tokenizer"), first.choices.get("tokenizer"))


def _tokenizer_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    unit = ", so losses per token cannot be compared; compare scores or bits per byte"
    return f"used another tokenizer than {name}{unit if _is_loss_per_token(first) else ''}"


def _equal_where_known(ours: Any, theirs: Any) -> bool | None:
    return None if ours is None or theirs is None else bool(ours == theirs)


def _same_training_data(run: ComparedRun, first: ComparedRun) -> bool:
    same = _equal_where_known(_batches(run).get("data"), _batches(first).get("data"))
    return _same_data(run, first, same, ["data.train"])


def _training_data_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    return f"had other training data than {name}"


def _same_validation_data(run: ComparedRun, first: ComparedRun) -> bool:
    same = _equal_where_known(run.choices.get("valid_data"), first.choices.get("valid_data"))
    return _same_data(run, first, same, _VALIDATION_KEYS)


def _validation_data_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    values = _values(run, first, _differing_keys_below(run, first, *_VALIDATION_KEYS))
    return f"had other validation data than {name}{values}"


def _same_data(run: ComparedRun, first: ComparedRun, is_equal: bool | None, keys: Sequence[str]) -> bool:
    """Compare data by fingerprints of token ids; if one is missing or the tokenizers differ, compare the run files."""
    if is_equal is None or not _same_tokenizer(run, first):
        return not _differing_keys_below(run, first, *keys)
    return is_equal


def _same_objective(run: ComparedRun, first: ComparedRun) -> bool:
    return not _objective_keys(run, first)


def _objective_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    return f"had another objective than {name}{_values(run, first, _objective_keys(run, first))}"


def _objective_keys(run: ComparedRun, first: ComparedRun) -> list[str]:
    return [key for key in _differing_keys_below(run, first, "task") if key not in _NO_OBJECTIVE]


def _same_temperature(run: ComparedRun, first: ComparedRun) -> bool:
    return not _differing_keys_below(run, first, "task.temperature")


def _temperature_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    values = _values(run, first, ["task.temperature"])
    return f"had another temperature than {name}{values}, so losses cannot be compared"


def _same_score(run: ComparedRun, first: ComparedRun) -> bool:
    return run.score_name == first.score_name


def _score_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    return f"had the score {run.score_name}, {name} had {first.score_name}"


# --- order, budget, start, machine ----------------------------------------------------------------------------


def _same_order(run: ComparedRun, first: ComparedRun) -> bool | None:
    """Return whether two runs form and shuffle batches alike, or None if unknown."""
    return not _order_keys(run, first) if _batches(run) and _batches(first) else None


def _order_keys(run: ComparedRun, first: ComparedRun) -> list[str]:
    return [key for key in differing_keys(_batches(run), _batches(first)) if key.split(".")[0] not in _NO_ORDER]


def _order_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    ours, theirs = _batches(run), _batches(first)
    shown = [
        f"{key} {_value_text(ours.get(key))}, not {_value_text(theirs.get(key))}" for key in _order_keys(run, first)
    ]
    return f"read batches in another order than {name} ({'; '.join(shown[:3])})"


def _same_budget(run: ComparedRun, first: ComparedRun) -> bool:
    return _budget(run) == _budget(first)


def _budget_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    return f"had a budget of {_budget(run)}, {name} had {_budget(first)}"


def _budget(run: ComparedRun) -> str:
    """Return the budget of a run as text, such as 400 steps."""
    limits = {name: run.value_of(f"train.{name}") for name in ("steps", "epochs", "seconds")}
    shown = [
        f"{_count(value)} {name if value != 1 else name[:-1]}" for name, value in limits.items() if value is not None
    ]
    patience = run.value_of("train.early_stop.patience")
    shown += [f"a patience of {patience}"] if patience is not None else []
    return " or ".join(shown) or "no limit"


def _count(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _same_start(run: ComparedRun, first: ComparedRun) -> bool:
    return bool(run.value_of("task.init") == first.value_of("task.init"))


def _start_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    ours, theirs = run.value_of("task.init"), first.value_of("task.init")
    if not ours:
        return f"started from scratch, {name} from {theirs}, whose training is not counted here"
    return f"started from {ours}, whose training is not counted here, {name} from {theirs or 'scratch'}"


def _machine(run: ComparedRun) -> dict[str, Any]:
    values = {**(run.state["environment"] if run.state is not None else {}), **run.choices}
    return {name: values[key] for key, name in _MACHINE.items() if key in values}


def _same_machine(run: ComparedRun, first: ComparedRun) -> bool | None:
    return _equal_where_known(_machine(run) or None, _machine(first) or None)


def _machine_clause(run: ComparedRun, first: ComparedRun, name: str) -> str:
    ours, theirs = _machine(run), _machine(first)
    keys = differing_keys(ours, theirs)
    shown = [f"{key} {_value_text(ours.get(key))} instead of {_value_text(theirs.get(key))}" for key in keys]
    return f"ran with {', and '.join(shown)}, so seconds cannot be compared with {name}"


# --- checks of rows -------------------------------------------------------------------------------------------


def _seeds(rows: Sequence[ComparisonRow]) -> list[tuple[str, str]]:
    first = rows[0]
    others = [row for row in rows if row.seeds != first.seeds]
    return [(row.name, f"had {_seed_list(row)}, {first.name} {_seed_list(first)}") for row in others]


def _seed_list(row: ComparisonRow) -> str:
    return f"the seed{'s' if len(row.seeds) > 1 else ''} {', '.join(map(str, row.seeds))}"


def _ratios(rows: Sequence[ComparisonRow], amount: Amount) -> list[tuple[str, str]]:
    """Return the rows that used more or less of an amount, such as tokens, than the first row, with the ratio."""
    first, differences = rows[0], []
    most, verb, read = _AMOUNTS[amount]
    for row in rows[1:]:
        if min(read(first), read(row)) <= 0:
            continue
        ratio = read(row) / read(first)
        if max(ratio, 1 / ratio) > most:
            times = f"{ratio:.2f}".rstrip("0").rstrip(".") if ratio < 100 else f"{ratio:,.0f}"
            shown = times if ratio >= 0.1 else f"{ratio:.2g}"
            differences.append((row.name, f"{verb} {shown} x the {amount} of {first.name}"))
    return differences


def _notes(row: ComparisonRow) -> Iterator[tuple[str, str]]:
    """Yield notes on the runs of a row, such as a missing checkpoint, each with the path of the run."""
    for run in row.runs:
        path = str(run.path)
        if run.state is None:
            yield path, "has no undamaged checkpoint, so data, tokenizer and order are not checked"
        elif run.work is None:
            yield path, "did not record its token counts, so its FLOPs are unknown"
        if run.unfinished is not None:
            yield path, f"reached {run.unfinished}: still in training, or interrupted"
        if run.best("loss") is None:
            yield path, "has no validation yet"
        if damaged := find_damaged_lines(run.path / FILE_NAME):
            yield path, f"has damaged lines in {FILE_NAME}, which are left out: {', '.join(map(str, damaged[:9]))}"
    twice = sorted({seed for seed in row.seeds if row.seeds.count(seed) > 1})
    if twice:
        paths = _join_names([str(run.path) for run in row.runs if run.seed == twice[0]])
        yield paths, f"have equal configurations and seeds, so the spread of {row.name} is too small"


# --- differences of run files ---------------------------------------------------------------------------------


def _differing_keys_below(run: ComparedRun, first: ComparedRun, *prefixes: str) -> list[str]:
    """Return the dotted keys, at or below the given keys, whose values differ between two run files."""
    keys = differing_keys(run.configuration, first.configuration)
    return [key for prefix in prefixes for key in keys if key == prefix or key.startswith(f"{prefix}.")]


def _values(run: ComparedRun, first: ComparedRun, keys: Sequence[str]) -> str:
    """Return the first three differing run-file keys, each with the values of both runs, as text."""
    shown = [f"{key} {_value_text(run.value_of(key))}, not {_value_text(first.value_of(key))}" for key in keys[:3]]
    return f" ({'; '.join(shown)})" if shown else ""


def _value_text(value: Any) -> str:
    return "not set" if value is None else str(value)
