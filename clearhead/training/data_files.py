"""Digests of a run's data files: stored when the run begins, and compared when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import RootModel

from clearhead.base.errors import InputError, within
from clearhead.base.files import convert_json, parse_json
from clearhead.data.sources.lines import size_and_ends
from clearhead.data.sources.run_file_tables import Form
from clearhead.data.sources.texts import TextShard, text_shards
from clearhead.training.runfile.sections import RunFile

DATA_FILES: Final = "data_files"
"""Key of the choice that stores the digests of the data files."""

_BLOCK: Final = 1 << 20


class _FileDigests(RootModel[dict[str, dict[str, tuple[int, str]]]]):
    """Number of lines and digest of each data file, by split and file name."""


def describe_files(run_file: RunFile) -> str:
    """Return number of lines and digest of every training and validation file, as JSON text.

    For a streamed text, the number of bytes of each file and a digest of its ends are used instead.

    Args:
        run_file: the checked run file; folders that are not streamed, and named data sets, are left out.
    """
    described: dict[str, dict[str, list[Any]]] = {}
    for split in ("train", "valid"):
        table = getattr(run_file.data, split)
        names = [str(value) for value in table.model_dump().values()] if isinstance(table, Form) else []
        described[split] = {name: list(_lines_and_digest(Path(name))) for name in names if _is_file(name)}
    if run_file.data.stream:
        described["train"] = {
            str(shard.path): list(size_and_ends(shard.path)) for shard in list_stream_shards(run_file)
        }
    return json.dumps(described)


def compare_files(choices: Mapping[str, object], run_file: RunFile, run: Path) -> list[str]:
    """Refuse to resume a run if its training data has changed since the run began; report changed validation data.

    Args:
        choices: the stored choices of the run.
        run_file: the checked run file.
        run: the run directory, for the message.

    Returns:
        A list with one message if the validation data has changed, else an empty list.

    Raises:
        InputError: the training data has changed.
    """
    if DATA_FILES not in choices:
        return []
    before, now = _parse_digests(str(choices[DATA_FILES]), run), _parse_digests(describe_files(run_file), run)
    changes = {
        split: [
            _describe_change(name, before[split].get(name), now[split].get(name), unit)
            for name in before[split] | now[split]
            if now[split].get(name) != before[split].get(name)
        ]
        for split, unit in (("train", "bytes" if run_file.data.stream else "lines"), ("valid", "lines"))
    }
    if changes["train"]:
        raise InputError(
            f"the training data has changed since the run in {run} began: {'; '.join(changes['train'])}. Restore it "
            "and resume, or start anew in another run directory (train.run=...)"
        )
    if changes["valid"]:
        return [
            f"the validation data has changed since the run began: {'; '.join(changes['valid'])}. Scores from here on "
            "cannot be compared with the earlier ones"
        ]
    return []


def _parse_digests(text: str, run: Path) -> dict[str, dict[str, tuple[int, str]]]:
    """Parse the JSON text of `describe_files`."""
    try:
        described = convert_json(parse_json(text), _FileDigests, name=f"{run}, stored digests of data files").root
    except json.JSONDecodeError as error:
        raise InputError(f"{run}: expected stored digests of data files in JSON, but {error.msg.lower()}") from None
    return {split: described.get(split, {}) for split in ("train", "valid")}


def _describe_change(name: str, old: tuple[int, str] | None, new: tuple[int, str] | None, unit: str) -> str:
    if new is None or old is None:
        return f"{name} is {'missing' if new is None else 'new'}"
    if old[0] == new[0]:
        return f"{name} has {new[0]:,} {unit} as before, but other content"
    words = "more" if new[0] > old[0] else "fewer"
    return f"{name} has {new[0]:,} {unit}, {abs(new[0] - old[0]):,} {words} than before"


def list_stream_shards(run_file: RunFile) -> list[TextShard]:
    """Return the files of a streamed training text.

    Raises:
        InputError: there is no file, or the text is not in files.
    """
    with within("[data] train"):
        return text_shards(run_file.data.train.as_source())


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _lines_and_digest(path: Path) -> tuple[int, str]:
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n"), digest.hexdigest()
