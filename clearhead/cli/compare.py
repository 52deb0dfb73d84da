"""`clearhead compare`: one fair table and one picture of several runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.console import human_count, print_either, print_message
from clearhead.cli.options import Force, Json, refuse_absent_runs
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.compare.fairness import Fairness
    from clearhead.compare.runs import Quality
    from clearhead.compare.table import Row, Spread

UNKNOWN = "-"
LONGEST_VALUE = 40
PICTURE = Path("compare.png")


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories, finished or not.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The picture of the learning curves, a PNG.")
    ] = PICTURE,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compare runs in one fair table and one picture.

    \b
    Example:
      clearhead compare runs/encoder runs/decoder -o families.png
    with a second seed of the first, which joins its row:
      clearhead train encoder.toml train.seed=2 train.run=runs/encoder-2
      clearhead compare runs/encoder runs/encoder-2 runs/decoder

    Runs that differ in train.seed alone are one row: the mean of the seeds and the sample standard deviation. FLOPs are
    those of the matrix products for the tokens seen, forward and backward, one multiplication and one addition 2;
    padding, norms and softmax are not counted. Non-embedding parameters are all but the tables of tokens, segments and
    positions. Seconds include validations, tokens/s do not. "best" is the best of all validations, loss and score each
    by itself. Unfair differences from the first row are listed below the table. The picture
    shows the validation score where every run has one, else the loss, against tokens and against time.
    --json ends with {"rows", "differs_in", "same", "unfair", "notes", "picture"}.
    """
    _check_picture(output, force)
    refuse_absent_runs(runs)
    from clearhead.compare.fairness import judge_fairness
    from clearhead.compare.table import differences, read_rows

    rows = read_rows(runs)
    fairness = judge_fairness(rows)
    differs = differences(rows)
    picture = _draw(rows, fairness, output)
    record = {
        "rows": [_record(row, fairness) for row in rows],
        "differs_in": differs,
        "same": list(fairness.same),
        "unfair": list(fairness.unfair),
        "notes": list(fairness.notes),
        "picture": None if picture is None else str(picture),
    }
    blocks = [
        "\n".join(block) for block in (_table(rows, fairness), _verdict(rows, fairness), _differences(rows, differs))
    ]
    print_either(as_json, record, *"\n\n".join(filter(None, blocks)).split("\n"))


def _check_picture(output: Path, force: bool) -> None:
    """Refuse a picture that cannot be written, before anything is read."""
    from clearhead.files import refuse_unwritable

    if output.suffix.lower() != ".png":
        raise InputError(f"the picture is a PNG, but -o names {output}: give a name that ends in .png")
    refuse_unwritable(output, force=force)


def _draw(rows: Sequence[Row], fairness: Fairness, output: Path) -> Path | None:
    """Draw the curves of the score if every row has one, else of the loss."""
    from clearhead.compare.picture import draw_curves

    quality: Quality = "loss"
    name = "loss (nats)"
    if all(row.best("score") is not None for row in rows):
        quality, name = "score", rows[0].first.score_name
    if all(row.best(quality) is None for row in rows):
        print_message("no picture: no run was validated yet")
        return None
    marked = [row.name for row in rows if _is_marked(row, quality, fairness)]
    notes = [f"not comparable with {rows[0].name}: {', '.join(marked)}"] if marked else []
    left_out = draw_curves(rows, output, quality=quality, name=name, notes=notes)
    print_message(f"learning curves: {output}" + (f" (without {', '.join(left_out)})" if left_out else ""))
    return output


# --- the table ------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], fairness: Fairness) -> Iterator[str]:
    """Yield the lines of the table: a line for each row, or a column if the terminal is too narrow."""
    cells = [_heads(rows), *(_cells(row, fairness) for row in rows)]
    if all(len(row.runs) == 1 for row in rows):
        cells = [[line[0], *line[2:]] for line in cells]
    if sys.stdout.isatty() and len(next(_aligned(cells))) > shutil.get_terminal_size().columns:
        cells = [list(column) for column in zip(*cells, strict=True)]
    yield from _aligned(cells)


def _heads(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(row.first.score_name for row in rows))
    sizes = ["parameters", "non-embedding", "FLOPs"]
    spent = ["tokens", "steps", "seconds", "tokens/s"]
    return ["run", "seeds", "family", *sizes, *spent, "best loss", f"best {'/'.join(names)}"]


def _cells(row: Row, fairness: Fairness) -> list[str]:
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


def _is_marked(row: Row, quality: Quality, fairness: Fairness) -> bool:
    return row.name in fairness.incomparable(quality) and row.best(quality) is not None


def _score(row: Row) -> str:
    best = row.best("score")
    # A fraction has four decimal places, a percentage two.
    return _number(best, 4 if best is not None and abs(best.mean) <= 1 else 2)


def _number(value: Spread | None, places: int) -> str:
    if value is None:
        return UNKNOWN
    spread = "" if value.deviation is None else f" ± {value.deviation:,.{places}f}"
    return f"{value.mean:,.{places}f}{spread}"


def _aligned(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows with aligned columns: text to the left, numbers to the right."""
    columns = []
    for column in zip(*cells, strict=True):
        side = ">" if all(map(_is_number, column[1:])) else "<"
        columns.append([f"{cell:{side}{max(map(len, column))}}" for cell in column])
    for line in zip(*columns, strict=True):
        yield "  ".join(line).rstrip()


def _is_number(cell: str) -> bool:
    return cell == UNKNOWN or cell[:1].isdigit() or cell[:2].lstrip("-")[:1].isdigit()


# --- below the table ------------------------------------------------------------------------------------------


def _verdict(rows: Sequence[Row], fairness: Fairness) -> Iterator[str]:
    words: dict[Quality, str] = {"loss": "losses", "score": "scores"}
    marked = [word for quality, word in words.items() if any(_is_marked(row, quality, fairness) for row in rows)]
    if marked:
        yield f"* {' and '.join(marked)} that cannot be compared with those of {rows[0].name}"
    if fairness.same:
        yield f"the same for all: {', '.join(fairness.same)}"
    yield from (f"unfair: {sentence}" for sentence in fairness.unfair)
    yield from (f"note: {sentence}" for sentence in fairness.notes)


def _differences(rows: Sequence[Row], differs: dict[str, list[Any]]) -> Iterator[str]:
    """Yield a line for each key, or a line for each row if there are fewer keys than rows."""
    cells = [["differs in", *(row.name for row in rows)]]
    cells += [[key, *map(_value, values)] for key, values in differs.items()]
    if len(differs) < len(rows):
        cells = [list(column) for column in zip(*cells, strict=True)]
    yield from _aligned(cells) if differs else []


def _value(value: Any) -> str:
    text = UNKNOWN if value is None else str(value)
    if isinstance(value, bool):
        text = text.lower()
    if len(text) <= LONGEST_VALUE:
        return text
    return text[: LONGEST_VALUE // 3] + "..." + text[3 - LONGEST_VALUE + LONGEST_VALUE // 3 :]


def _record(row: Row, fairness: Fairness) -> dict[str, Any]:
    """Return a row as JSON values; a number with a spread is {"mean", "deviation", "count"}."""
    from dataclasses import asdict

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
