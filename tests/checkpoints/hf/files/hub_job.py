"""Fetch what is asked for in a process whose surroundings say which hub there is; one line of JSON for each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.reference import ModelReference, fetch


def locate(reference: str) -> Path | None:
    return ModelReference.locate(reference).checkpoint_folder()


def answer(reference: str) -> dict[str, object]:
    try:
        folder = fetch(reference[1:], with_bin=True) if reference.startswith("+") else locate(reference)
        assert folder is not None
        names = sorted(path.name for path in folder.iterdir())
        rows = None if "model.safetensors" not in names else load_module(folder).module.num_source_ids
        return {"folder": str(folder), "names": names, "rows": rows}
    except InputError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps({"asked": argument, **answer(argument)}), flush=True)
