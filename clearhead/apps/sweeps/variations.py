"""Varied keys of a sweep: parse them from the command line or a sweep file, and write a sweep file."""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field

from clearhead.base.errors import InputError, did_you_mean, shorten
from clearhead.base.files import convert_json, read_text_file
from clearhead.training.runfile.read import toml_value

Equal = Literal["steps", "tokens", "seconds", "parameters"]
Configuration = Mapping[str, Any]

BASE_FILE: Final = "base.toml"
SWEEP_FILE: Final = "sweep.toml"
SEED: Final = "train.seed"
MOST_RUNS: Final = 256
"""The most runs of a sweep: a larger grid is probably a mistake, since each key multiplies the runs."""
_RANGE: Final = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")
_LONGEST_NAME: Final = 80


@dataclass(frozen=True)
class Variation:
    """Varied run-file keys of a sweep with their values, as a grid or as a list of runs.

    Attributes:
        grid: the values of each key, combined in every way; empty if a list is given.
        listed: the keys and values of each run; empty if a grid is given.
    """

    grid: Mapping[str, Any]
    listed: Sequence[Configuration] = ()

    @property
    def keys(self) -> list[str]:
        """Varied run-file keys, in the given order."""
        return list(dict.fromkeys(itertools.chain(self.grid, *self.listed)))

    def configurations(self) -> list[Configuration]:
        """Return the varied keys and values of each run; in a grid, runs that differ only in the seed are neighbours.

        Raises:
            InputError: no key is varied, there are too many runs, or two runs are equal.
        """
        for key, values in self.grid.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise InputError(f"{key}: expected a list of values, got {values!r:.80}")
            if not values:
                raise InputError(f"{key} has no values: give some, such as {key}=1,2")
        for key, value in self._assignments():
            if value is None or not isinstance(value, bool | int | float | str | Mapping | Sequence):
                raise InputError(f"{key}: expected a number, a text or a list as a value, got {value!r:.80}")
        number = len(self.listed) or math.prod(map(len, self.grid.values()))
        if not self.keys:
            raise InputError("the sweep varies no key: name a key and its values, such as train.seed=1..3")
        if number > MOST_RUNS:
            raise InputError(f"the sweep has {number:,} runs, but at most {MOST_RUNS} are allowed: vary fewer keys")
        # The seed varies fastest, wherever it was given.
        keys = sorted(self.grid, key=lambda key: key == SEED)
        grid = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(self.grid[key] for key in keys))]
        runs = [dict(run) for run in self.listed] or grid
        for number, run in enumerate(runs):
            if run in runs[:number]:
                raise InputError(f"the sweep has {describe_run(run)} twice: name each run once")
        return list(runs)

    def _assignments(self) -> Iterator[tuple[str, Any]]:
        for key, values in self.grid.items():
            yield from ((key, value) for value in values[:MOST_RUNS])
        for run in self.listed:
            yield from run.items()

    def to_toml(self, equal: Equal) -> str:
        """Return the text of a sweep file with the varied keys, their values and the budget.

        Args:
            equal: the budget that is equal for all runs.
        """
        lines = [f'equal = "{equal}"', "", *(["[vary]"] if self.grid else [])]
        lines += _toml_lines({key: list(values) for key, values in self.grid.items()})
        for run in self.listed:
            lines += ["[[runs]]", *_toml_lines(run), ""]
        return "\n".join(lines).rstrip() + "\n"


def _toml_lines(values: Configuration) -> list[str]:
    return [f"{json.dumps(key)} = {toml_value(value)}" for key, value in values.items()]


def describe_run(run: Configuration) -> str:
    """Return the varied keys and values of a run as text, such as model.layers=2."""
    return shorten(" ".join(f"{key}={toml_value(value)}" for key, value in run.items()), 200) or "the plain run file"


class _SweepFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    equal: Equal = "steps"
    vary: dict[str, list[Any]] = {}
    runs: Annotated[list[dict[str, Any]], Field(max_length=MOST_RUNS)] = []


def read_sweep_file(path: Path) -> tuple[Variation, Equal]:
    """Read the variation and the budget from a sweep file.

    Args:
        path: the sweep file. It has `equal`, and a table [vary] with lists of values or tables [[runs]] with the keys
        and values of each run.

    Raises:
        InputError: the file cannot be read, or is not a sweep file.
    """
    try:
        tree = tomllib.loads(read_text_file(path, "sweep file"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not valid TOML: {error}") from None
    content = convert_json(json.loads(json.dumps(tree, default=str)), _SweepFile, name=str(path))
    if content.vary and content.runs:
        raise InputError(f"{path} has both [vary] and [[runs]], but a sweep is a grid or a list: remove one")
    return Variation(content.vary, content.runs), content.equal


def parse_budget(name: str) -> Equal:
    """Parse the name of a budget: steps, tokens, seconds or parameters.

    Raises:
        InputError: the name is unknown.
    """
    for equal in get_args(Equal):
        if name == equal:
            return cast(Equal, equal)
    names = get_args(Equal)
    raise InputError(f"--equal expects {', '.join(names[:-1])} or {names[-1]}, got '{name}'{did_you_mean(name, names)}")


def parse_variation(words: Sequence[str]) -> tuple[Variation, Equal | None]:
    """Parse the values of the option --sweep: varied keys with their values, or one sweep file.

    Args:
        words: texts KEY=VALUES, or the path of one sweep file.

    Returns:
        The variation, and the budget of a sweep file or None.

    Raises:
        InputError: a word is neither of these, a key is named twice, or its values cannot be parsed.
    """
    if len(words) == 1 and "=" not in words[0] and (words[0].endswith(".toml") or Path(words[0]).exists()):
        return read_sweep_file(Path(words[0]))
    grid: dict[str, Sequence[Any]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise InputError(
                f"--sweep expects KEY=VALUES, such as train.seed=1..3, or one sweep file; '{word}' has no values and "
                "is no file"
            )
        if key in grid:
            raise InputError(f"{key} is swept twice: give all its values together, such as {key}=1,2")
        grid[key] = parse_values(key, text)
    return Variation(grid), None


def parse_values(key: str, text: str) -> Sequence[Any]:
    """Parse the values of a varied key: `pre,post`, `1..3`, or a TOML list such as `[[0.9, 0.98], [0.9, 0.999]]`.

    Args:
        key: the name of the key, for messages.
        text: the values as text.

    Raises:
        InputError: a range is reversed, or a list is not TOML.
    """
    ends = _RANGE.fullmatch(text)
    if ends is not None:
        first, last = int(ends[1]), int(ends[2])
        if first > last:
            raise InputError(f"{key}={text} is a reversed range: write {last}..{first}")
        if last - first >= MOST_RUNS:
            raise InputError(f"{key}={text} has {last - first + 1:,} values, but a sweep has at most {MOST_RUNS} runs")
        return range(first, last + 1)
    if text.startswith("["):
        values = _parse_toml(text)
        if values is None:
            raise InputError(f"{key}={text} is not a TOML list: expected a list such as {key}=[1, 2]")
        return list(values)
    words = [word.strip() for word in text.split(",")] if text else []
    if "" in words:
        raise InputError(f"{key}={text} has an empty value: remove the extra comma")
    return [word if (value := _parse_toml(word)) is None else value for word in words]


def _parse_toml(text: str) -> Any:
    """Return a text as a TOML value, or None if it is a bare word."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return tree["value"] if list(tree) == ["value"] else None


def run_names(runs: Sequence[Configuration]) -> list[str]:
    """Return a directory name for each run, made of its varied keys and values, with the seed at the end.

    Args:
        runs: the keys and values of each run.
    """
    keys = list(dict.fromkeys(itertools.chain(*runs)))
    last = Counter(key.rpartition(".")[2] for key in keys)
    names: list[str] = []
    for run in runs:
        words = [f"{_short_key(key, last)}={value}" for key, value in run.items() if key != SEED]
        words += [f"seed{run[SEED]}"] if SEED in run else []
        # Keep only characters that are valid in file names and in shells.
        name = re.sub(r"[^\w.+=-]+", "_", "-".join(words))[:_LONGEST_NAME] or "as-it-is"
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def _short_key(key: str, last: Mapping[str, int]) -> str:
    """Return the last word of a dotted key, or the whole key if another varied key ends with the same word."""
    word = key.rpartition(".")[2]
    return word if last[word] == 1 else key
