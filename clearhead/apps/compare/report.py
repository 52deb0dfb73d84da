"""Report of a comparison: a table with intervals, its numbers as JSON, and a picture of the learning curves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from clearhead.apps.compare.fairness import Amount, Fairness, judge_fairness
from clearhead.apps.compare.runs import ComparedRun, Quality
from clearhead.apps.compare.table import ComparisonRow, Spread, differing_values, read_rows
from clearhead.base.figures import (
    COLOURS,
    INK,
    THICK,
    THIN,
    draw_legend,
    late_limits,
    new_figure,
    save_figure,
    style_line_axes,
)
from clearhead.base.printing import Printed, human_count
from clearhead.base.progress import message

LEVEL: Final = 0.95
"""The confidence level of the intervals."""
_POINTS: Final = 2001
_HALVINGS: Final = 60


@dataclass(frozen=True, repr=False)
class RowDifference(Printed):
    """The difference between the best validations of two rows, with an interval by Student's t.

    If both rows have at least two seeds in common, the differences per seed form one sample. Otherwise the rows are two
    samples with a variance each.

    Source: Student (1908), The probable error of a mean; Welch (1947), The generalization of 'Student's' problem.

    Attributes:
        row, reference: the names of the rows; a positive difference means that `row` has the larger value.
        quality: the compared number, loss or score.
        mean: the difference of the means.
        low, high: the ends of the interval. None means that a row has only one seed.
        seeds: the paired seeds; empty if the rows are two samples.
        counts: the number of seeds of the row and of the reference.
    """

    row: str
    reference: str
    quality: Quality
    mean: float
    low: float | None
    high: float | None
    seeds: tuple[int, ...]
    counts: tuple[int, int]

    @property
    def is_told_apart(self) -> bool | None:
        """True if zero is outside the interval; None without an interval."""
        return None if self.low is None or self.high is None else not self.low <= 0.0 <= self.high


def compute_difference(row: ComparisonRow, reference: ComparisonRow, quality: Quality) -> RowDifference | None:
    """Return the difference of a row from a reference row, or None if one of them has no such validation."""
    ours, theirs = _by_seed(row, quality), _by_seed(reference, quality)
    if not ours or not theirs:
        return None
    seeds, reach = _common_seeds(ours, theirs), None
    if seeds:
        changes = [ours[seed][0] - theirs[seed][0] for seed in seeds]
        mean = fmean(changes)
        counts = (len(changes), len(changes))
        reach = student_quantile(len(changes) - 1.0) * math.sqrt(variance(changes) / len(changes))
    else:
        first, second = (list(chain.from_iterable(runs.values())) for runs in (ours, theirs))
        mean = fmean(first) - fmean(second)
        counts = (len(first), len(second))
        reach = _half_interval(first, second)
    low, high = (None, None) if reach is None else (mean - reach, mean + reach)
    return RowDifference(row.name, reference.name, quality, mean, low, high, seeds, counts)


def compute_differences(
    rows: Sequence[ComparisonRow], incomparable: Mapping[Quality, Collection[str]]
) -> tuple[RowDifference, ...]:
    """Return the differences of all rows from the first one.

    Args:
        rows: the rows, at least one.
        incomparable: the names of the rows whose loss or score cannot be compared with that of the first row.
    """
    pairs = [(row, quality) for row in rows[1:] for quality in incomparable if row.name not in incomparable[quality]]
    every = (compute_difference(row, rows[0], quality) for row, quality in pairs)
    return tuple(difference for difference in every if difference is not None)


def _by_seed(row: ComparisonRow, quality: Quality) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for run in row.runs:
        best = run.best(quality)
        if best is not None:
            values.setdefault(run.seed, []).append(best)
    return values


def _common_seeds(ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]]) -> tuple[int, ...]:
    """Return the common seeds of two rows; empty if they are fewer than two, or a seed was trained twice."""
    seeds = tuple(sorted({*ours} & {*theirs}))
    is_clear = all(len(ours[seed]) == len(theirs[seed]) == 1 for seed in seeds)
    return seeds if len(seeds) >= 2 and is_clear else ()


def _half_interval(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return half the width of the confidence interval of a difference of means; None if a sample has one value."""
    if min(len(first), len(second)) < 2:
        return None
    errors = [variance(sample) / len(sample) for sample in (first, second)]
    total = sum(errors)
    if total == 0.0:
        return 0.0
    spent = sum(error**2 / (len(sample) - 1) for error, sample in zip(errors, (first, second), strict=True))
    return student_quantile(total**2 / spent) * math.sqrt(total)


def student_quantile(freedom: float, level: float = LEVEL) -> float:
    """Return the half-width of a confidence interval in standard errors, by Student's t.

    With t = sqrt(n) tan(a), the probability within t is an integral of cos(a)^(n - 1), which has no singularity.

    Args:
        freedom: the degrees of freedom, at least 1; a fraction for two samples.
        level: the probability inside the interval.
    """
    scale = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        angles = np.linspace(0.0, middle, _POINTS)
        heights = np.cos(angles) ** (freedom - 1)
        within = scale * middle * float(heights[:-1].mean() + heights[1:].mean()) / 2
        low, high = (middle, high) if within < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


UNKNOWN: Final = "-"
LONGEST_VALUE: Final = 40


@dataclass(frozen=True, repr=False)
class RunComparison(Printed):
    """A comparison of runs; as a string it is the table.

    Attributes:
        rows: the rows, with the seeds of one configuration each.
        fairness: the equal properties and the unfair differences of the rows.
    """

    rows: tuple[ComparisonRow, ...]
    fairness: Fairness

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @cached_property
    def differs_in(self) -> dict[str, list[Any]]:
        """The run-file keys in which rows differ, each with its value in every row."""
        return differing_values(self.rows)

    @cached_property
    def differences(self) -> tuple[RowDifference, ...]:
        """The differences from the first row, with their intervals over the seeds."""
        return compute_differences(self.rows, {"loss": self.fairness.losses, "score": self.fairness.scores})

    def lines(self, columns: int | None = None) -> list[str]:
        """Return the table, its notes and the differences as lines of text.

        Args:
            columns: the width of the terminal; a wider table is transposed. None means unlimited.
        """
        blocks = (
            _table(self.rows, self.fairness, columns),
            _fairness_lines(self.rows, self.fairness),
            _difference_lines(self),
            _differences(self.rows, self.differs_in),
        )
        return "\n\n".join(filter(None, map("\n".join, blocks))).split("\n")

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "rows": [_record(row, self.fairness) for row in self.rows],
            "differences": [asdict(each) | {"told_apart": each.is_told_apart} for each in self.differences],
            "differs_in": self.differs_in,
            "same": list(self.fairness.same),
            "unfair": list(self.fairness.unfair),
            "notes": list(self.fairness.notes),
        }

    def draw(self, path: Path) -> Path | None:
        """Draw the curves of the score if every row has one, else of the loss.

        Args:
            path: the PNG to write.

        Returns:
            The path, or None if no run was validated yet.

        Raises:
            InputError: the file cannot be written.
        """
        quality: Quality = "loss"
        name = "loss (nats)"
        if all(row.best("score") is not None for row in self.rows):
            quality, name = "score", self.rows[0].first.score_name
        if all(row.best(quality) is None for row in self.rows):
            message("no picture: no run was validated yet")
            return None
        marked = [row.name for row in self.rows if _is_marked(row, quality, self.fairness)]
        notes = [f"not comparable with {self.rows[0].name}: {', '.join(marked)}"] if marked else []
        left_out = draw_curves(self.rows, path, quality=quality, name=name, notes=notes)
        message(f"learning curves: {path}" + (f" (without {', '.join(left_out)})" if left_out else ""))
        return path


def compare_runs(paths: Sequence[Path], *, equal: Amount = "steps", shared_machine: bool = False) -> RunComparison:
    """Read runs and compare them.

    Args:
        paths: the run directories, at least one.
        equal, shared_machine: the budget and the use of the machine; see `judge_fairness`.

    Raises:
        InputError: a run cannot be read or is named twice, or the tasks differ; all faults in one report.
    """
    rows = tuple(read_rows(paths))
    return RunComparison(rows, judge_fairness(rows, equal=equal, shared_machine=shared_machine))


# --- the table ------------------------------------------------------------------------------------------------


def _table(rows: Sequence[ComparisonRow], fairness: Fairness, columns: int | None) -> Iterator[str]:
    """Yield the lines of the table, transposed if the terminal is too narrow."""
    cells = [_column_names(rows), *(_cells(row, fairness) for row in rows)]
    if all(len(row.runs) == 1 for row in rows):
        cells = [[line[0], *line[2:]] for line in cells]
    if columns is not None and len(next(_align_columns(cells))) > columns:
        cells = [list(column) for column in zip(*cells, strict=True)]
    yield from _align_columns(cells)


def _column_names(rows: Sequence[ComparisonRow]) -> list[str]:
    names = list(dict.fromkeys(row.first.score_name for row in rows))
    sizes = ["parameters", "non-embedding", "FLOPs"]
    spent = ["tokens", "steps", "seconds", "tokens/s"]
    return ["run", "seeds", "family", *sizes, *spent, "best loss", f"best {'/'.join(names)}"]


def _cells(row: ComparisonRow, fairness: Fairness) -> list[str]:
    parameters, flops, speed = row.first.parameters, row.flops, row.tokens_per_second
    return [
        row.name,
        str(len(row.runs)),
        row.first.spec.family,
        human_count(parameters.total),
        human_count(parameters.total - parameters.embeddings),
        UNKNOWN if flops is None else f"{flops.mean:.2e}".replace("e+", "e"),
        human_count(row.tokens.mean),
        f"{row.steps.mean:,.0f}",
        _number(row.seconds, 1 if row.seconds.mean < 100 else 0),
        UNKNOWN if speed is None else f"{speed.mean:,.0f}",
        _number(row.best("loss"), 4) + "*" * _is_marked(row, "loss", fairness),
        _score(row) + "*" * _is_marked(row, "score", fairness),
    ]


def _is_marked(row: ComparisonRow, quality: Quality, fairness: Fairness) -> bool:
    return row.name in fairness.incomparable(quality) and row.best(quality) is not None


def _score(row: ComparisonRow) -> str:
    best = row.best("score")
    # Fractions have four decimal places, percentages two.
    return _number(best, 4 if best is not None and abs(best.mean) <= 1 else 2)


def _number(value: Spread | None, places: int) -> str:
    if value is None:
        return UNKNOWN
    spread = "" if value.deviation is None else f" ± {value.deviation:,.{places}f}"
    return f"{value.mean:,.{places}f}{spread}"


def _align_columns(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines with aligned columns, text to the left and numbers to the right."""
    columns = []
    for column in zip(*cells, strict=True):
        side = ">" if all(map(_is_number, column[1:])) else "<"
        columns.append([f"{cell:{side}{max(map(len, column))}}" for cell in column])
    for line in zip(*columns, strict=True):
        yield "  ".join(line).rstrip()


def _is_number(cell: str) -> bool:
    return cell == UNKNOWN or cell[:1].isdigit() or cell[:2].lstrip("-")[:1].isdigit()


# --- below the table ------------------------------------------------------------------------------------------


def _fairness_lines(rows: Sequence[ComparisonRow], fairness: Fairness) -> Iterator[str]:
    words: dict[Quality, str] = {"loss": "losses", "score": "scores"}
    marked = [word for quality, word in words.items() if any(_is_marked(row, quality, fairness) for row in rows)]
    if marked:
        yield f"* {' and '.join(marked)} that cannot be compared with those of {rows[0].name}"
    if fairness.same:
        yield f"the same for all: {', '.join(fairness.same)}"
    yield from (f"unfair: {sentence}" for sentence in fairness.unfair)
    yield from (f"note: {sentence}" for sentence in fairness.notes)


def _difference_lines(comparison: RunComparison) -> Iterator[str]:
    """Yield a line for each difference from the first row, or a note if every row has one seed."""
    if any(len(row.runs) > 1 for row in comparison.rows):
        name = comparison.rows[0].first.score_name
        yield from (_sentence(each, "loss" if each.quality == "loss" else name) for each in comparison.differences)
    elif comparison.differences:
        yield "no intervals: each row has one seed; train more seeds (train.seed), at least two per row"


def _sentence(difference: RowDifference, name: str) -> str:
    places = 4 if difference.quality == "loss" or abs(difference.mean) <= 0.01 else 2
    start = f"{difference.row} against {difference.reference}: best {name} {difference.mean:+,.{places}f}"
    if difference.low is None or difference.high is None:
        return f"{start}, without an interval, which needs two seeds of each"
    seeds = f"{len(difference.seeds)} paired seeds"
    if not difference.seeds:
        seeds = " and ".join(map(str, difference.counts)) + " seeds"
    interval = f"{LEVEL:.0%} interval {difference.low:+,.{places}f} to {difference.high:+,.{places}f}, {seeds}"
    return f"{start} ({interval})" + ("" if difference.is_told_apart else ": cannot be told apart with these seeds")


def _differences(rows: Sequence[ComparisonRow], differs: dict[str, list[Any]]) -> Iterator[str]:
    """Yield a line for each run-file key that differs, or for each row if there are fewer keys than rows."""
    cells = [["differs in", *(row.name for row in rows)]]
    cells += [[key, *map(_value, values)] for key, values in differs.items()]
    if len(differs) < len(rows):
        cells = [list(column) for column in zip(*cells, strict=True)]
    yield from _align_columns(cells) if differs else []


def _value(value: Any) -> str:
    text = UNKNOWN if value is None else str(value)
    if isinstance(value, bool):
        text = text.lower()
    if len(text) <= LONGEST_VALUE:
        return text
    return text[: LONGEST_VALUE // 3] + "..." + text[3 - LONGEST_VALUE + LONGEST_VALUE // 3 :]


def _record(row: ComparisonRow, fairness: Fairness) -> dict[str, Any]:
    """Return a row of the comparison as JSON values; numbers over its seeds are {"mean", "deviation", "count"}."""
    parameters = row.first.parameters
    numbers = {
        "training_flops": row.flops,
        "tokens": row.tokens,
        "steps": row.steps,
        "seconds": row.seconds,
        "tokens_per_second": row.tokens_per_second,
        "best_valid_loss": row.best("loss"),
        "best_valid_score": row.best("score"),
    }
    return {
        "name": row.name,
        "runs": [str(run.path) for run in row.runs],
        "seeds": row.seeds,
        "family": row.first.spec.family,
        "parameters": parameters.total,
        "parameters_without_embeddings": parameters.total - parameters.embeddings,
        **{name: None if value is None else asdict(value) for name, value in numbers.items()},
        "score_name": row.first.score_name,
        "loss_is_comparable": row.name not in fairness.losses,
        "score_is_comparable": row.name not in fairness.scores,
        "finished": all(run.unfinished is None for run in row.runs),
    }


DASHES: Final = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
UNITS: Final = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
LEFT: Final = 0.065


@dataclass(frozen=True)
class Curve:
    """Points of a learning curve: training tokens, seconds and the loss or score of each validation."""

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]


def draw_curves(
    rows: Sequence[ComparisonRow], path: Path, *, quality: Quality, name: str, notes: Sequence[str] = ()
) -> list[str]:
    """Draw the validations of all rows: a thick line for the mean of the seeds, thin lines for several seeds.

    Args:
        rows: the rows; those without a validation are left out.
        path: the PNG to write.
        quality: the number to draw, loss or score.
        name: the label of the vertical axis.
        notes: sentences to write into the picture.

    Returns:
        The names of the rows that were left out.

    Raises:
        InputError: the file cannot be written.
    """
    drawn = [row for row in rows if any(run.points(quality) for run in row.runs)]
    lines = ["higher is better" if quality == "score" else "lower is better", *notes]
    if any(len(row.runs) > 1 for row in drawn):
        lines[0] += "; thin: one seed, thick: the mean of the seeds"
    width, height = 11.0, 5.0 + 0.2 * len(notes)
    figure = new_figure(width, height, f"Validation {name}", lines, left=LEFT * width)
    top = 1 - (0.76 + 0.2 * len(lines)) / height
    panels = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=LEFT, right=0.985, wspace=0.12, bottom=0.6 / height, top=top)
    unit, unit_name = _time_unit(drawn)
    labels = (("tokens", 1.0, "training tokens"), ("seconds", unit, f"{unit_name}, validations included"))
    for axes, (x_field, scale, label) in zip(panels, labels, strict=True):
        style_line_axes(axes, label)
        _draw_panel(axes, drawn, x_field, scale, quality)
    panels[0].set_ylabel(name, color=INK)
    save_figure(figure, path)
    return [row.name for row in rows if row not in drawn]


def _time_unit(rows: Sequence[ComparisonRow]) -> tuple[float, str]:
    """Return the time unit for the longest run: its seconds and its name."""
    longest = max((run.metrics[-1].seconds for row in rows for run in row.runs), default=0.0)
    return next((seconds, name) for least, seconds, name in UNITS if longest >= least)


def _draw_panel(axes: Axes, rows: Sequence[ComparisonRow], x_field: str, scale: float, quality: Quality) -> None:
    axes.tick_params(labelleft=True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    if x_field == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    lines = [(row.name, _draw_row(axes, row, number, x_field, scale, quality)) for number, row in enumerate(rows)]
    axes.set_xlim(left=0)
    axes.set_ylim(late_limits([value for _, value in run.points(quality)] for row in rows for run in row.runs))
    draw_legend(axes, lines, corner="upper right" if quality == "loss" else "lower right")


def _draw_row(axes: Axes, row: ComparisonRow, number: int, x_field: str, scale: float, quality: Quality) -> Line2D:
    """Draw the lines of one row, and return the line of its mean."""
    color = COLOURS[number % len(COLOURS)]
    style = {"color": color, "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}
    seeds = [curve_of(run, quality) for run in row.runs if run.points(quality)]
    mean = mean_curve(seeds)
    for seed in seeds if len(seeds) > 1 else []:
        _draw_line(axes, seed, x_field, scale, style | {"linewidth": THIN, "alpha": 0.45})
    ending = {"marker": "o", "markersize": 5, "markevery": [-1]}
    return _draw_line(axes, mean, x_field, scale, style | {"linewidth": THICK, **ending})


def curve_of(run: ComparedRun, quality: Quality) -> Curve:
    """Return the learning curve of one run."""
    points = run.points(quality)
    return Curve(
        tuple(float(row.tokens) for row, _ in points),
        tuple(row.seconds for row, _ in points),
        tuple(value for _, value in points),
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the pointwise mean of curves, up to the end of the shortest."""

    def mean(lines: list[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(fmean(points) for points in zip(*lines, strict=False))

    return Curve(*(mean([getattr(curve, field) for curve in curves]) for field in ("tokens", "seconds", "values")))


def _draw_line(axes: Axes, curve: Curve, x_field: str, scale: float, style: dict[str, Any]) -> Line2D:
    x = [coordinate / scale for coordinate in getattr(curve, x_field)]
    (line,) = axes.plot(x, curve.values, solid_capstyle="round", **style)
    return line
