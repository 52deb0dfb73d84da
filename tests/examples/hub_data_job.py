"""Read the data of run files, and write new ones, in a process whose environment names the hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from clearhead.apps.cli.main import main
from clearhead.apps.recipes import fit
from clearhead.apps.recipes.fit import FittedRunFile
from clearhead.apps.recipes.run_file import DataPlan, RunFileChoice, run_file_text
from clearhead.base.errors import InputError
from clearhead.data.sources.tables import Dataset
from clearhead.spec.tasks.registry import find_task
from clearhead.training.runfile.read import load_run_file


def read(file: Path) -> dict[str, object]:
    """Return the first row of the training and of the validation data."""
    first_rows: dict[str, object] = {}
    for split in ("train", "valid"):
        table = getattr(load_run_file(file).data, split)
        if hasattr(table, "dataset"):
            source = table.as_source()
            rows = source.rows() if hasattr(source, "rows") else source.chunks()
            first = next(iter(rows))
            first_rows[split] = first.text if hasattr(first, "text") else first[1]
    return first_rows


def fit_smallest(plan: DataPlan, minutes: float) -> FittedRunFile:
    """Take the smallest model of a recipe, and measure nothing."""
    recipe = find_task(plan.task).recipe(plan.amount)
    return FittedRunFile(run_file_text(plan, recipe, RunFileChoice(recipe.sizes[0], 32, steps=30)), 30, 1.0)


if __name__ == "__main__":
    fit.fit_run_file = fit_smallest
    examples, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for file in sorted(examples.glob("*.toml")):
        print(json.dumps({"file": file.stem, **read(file)}), flush=True)
    for name, options in json.loads(sys.argv[3]).items():
        code = main(["new", *options, "-o", str(folder / f"{name}.toml")])
        print(json.dumps({"new": name, "code": code}), flush=True)
    for name in ("some/missing", "some/script"):
        try:
            list(Dataset(name, "train", {"text": "text"}).rows())
        except InputError as error:
            print(json.dumps({"refused": name, "error": str(error)}), flush=True)
