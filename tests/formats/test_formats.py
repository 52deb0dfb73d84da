"""Formats: a folder or file of each format, written by an earlier version, is read; other numbers are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import clearhead as ch
from clearhead.apps.check.job.job import CERTIFICATE, read_certificate
from clearhead.base.errors import InputError
from clearhead.base.formats import FORMAT_FILE, FileFormat
from clearhead.checkpoints.runs.checkpoint import FORMAT as CHECKPOINT
from clearhead.checkpoints.runs.checkpoint import read_state
from clearhead.checkpoints.runs.directory import RUN_FORMAT, SAVED_FORMAT, open_run
from clearhead.data.cache import FORMAT as STORE
from clearhead.data.stores.store import Store, StoreKind, separate_lengths
from clearhead.interpret.view.arrays import MAPS
from clearhead.version import __version__
from tests.formats.make_samples import make

SAMPLES = Path(__file__).parent / "samples"
KIND = StoreKind("pairs", "made pairs", ("source", "target"), lambda store: "", separate_lengths)
STATE = "run/checkpoints/step-2"


def in_json(name: str) -> Callable[[Path, Any], None]:
    """Return a function that changes the format number of a JSON file, as the next version may."""

    def change(samples: Path, number: int | None) -> None:
        content = json.loads((samples / name).read_text("utf-8"))
        content = {**content, "format": number, "clearhead": "7.8.9"}
        (samples / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def in_maps(samples: Path, number: int | None) -> None:
    arrays = dict(np.load(samples / "maps.npz"))
    header = {} if number is None else {"format": number, "clearhead": "7.8.9"}
    np.savez(samples / "maps.npz", **{name: arrays[name] for name in arrays if name != "format"} | header)


KINDS: dict[str, tuple[FileFormat, Callable[[Path, Any], None], Callable[[Path], Any]]] = {
    "run": (RUN_FORMAT, in_json(f"run/{FORMAT_FILE}"), lambda path: ch.load(path / "run", device="cpu")),
    "saved": (SAVED_FORMAT, in_json(f"saved/{FORMAT_FILE}"), lambda path: ch.load(path / "saved", device="cpu")),
    "checkpoint": (CHECKPOINT, in_json(f"{STATE}/state.json"), lambda path: read_state(path / STATE)),
    "store": (STORE, in_json("store/store.json"), lambda path: Store(path / "store", KIND, (0, 0))),
    "maps": (MAPS, in_maps, lambda path: ch.view_attention(path / "maps.npz")),
    "certificate": (
        CERTIFICATE,
        in_json("certificate.json"),
        lambda path: read_certificate(path / "certificate.json"),
    ),
}


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLES, tmp_path / "samples"))


def test_what_an_earlier_version_wrote_is_read(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(samples)
    run, saved = ch.load("run", device="cpu"), ch.load("saved", device="cpu")
    assert run.spec == saved.spec
    weights = zip(run.module.parameters(), saved.module.parameters(), strict=True)
    assert all((tensor == other).all() for tensor, other in weights)
    assert read_state(Path(STATE))["step"] == 2
    store = Store(Path("store"), KIND, (1, 1))
    assert [store.texts[0][1].tolist(), store.texts[1][1].tolist()] == [[7, 8, 5], [5]]
    maps = run.attention("ein hund", target="hund")
    page = ch.view_attention("maps.npz")
    stacks = page._page.samples[0].attentions
    assert [stack.stack for stack in stacks] == list(maps.stacks)
    for stack in stacks:
        first_weights = stack.layers[0].weights
        assert first_weights is not None
        assert np.allclose(first_weights()[1], maps.weights(stack.stack, 0, 1).numpy(), atol=1e-6)
    page.save_html("page.html")
    record, lines = read_certificate(Path("certificate.json"))
    assert record["ok"] and "is the same" in lines[0]
    (samples / "run.toml").write_text("[task]\n", encoding="utf-8")
    record, lines = read_certificate(Path("certificate.json"))
    assert not record["ok"] and "has changed since" in lines[0]


def test_runs_and_saved_models_of_the_first_format_are_the_same_models(samples: Path) -> None:
    for name in ("run", "saved"):
        now, before = (
            ch.load(samples / name, device="cpu"),
            ch.load(SAMPLES.parent / "earlier" / f"{name}-1", device="cpu"),
        )
        assert now.spec == before.spec
        weights = zip(now.module.parameters(), before.module.parameters(), strict=True)
        assert all((tensor == other).all() for tensor, other in weights)


def test_maps_of_the_first_format_number_the_steps_of_the_decoder(samples: Path) -> None:
    """Their writer saved no written tokens, and those that are read stand one row too late."""
    page = ch.view_attention(SAMPLES.parent / "earlier" / "maps-1.npz")
    rows = page._page.samples[0].rows
    assert rows["written"].texts == tuple(f"step {number}" for number in range(len(rows["decoder"].texts)))
    new = ch.view_attention(samples / "maps.npz")._page.samples[0].rows["written"].texts
    assert new[:-1] == tuple(ch.view_attention(samples / "maps.npz")._page.samples[0].rows["decoder"].texts[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_is_refused_in_one_sentence(kind: str, samples: Path) -> None:
    kind_format, change, read = KINDS[kind]
    change(samples, kind_format.number + 1)
    with pytest.raises(InputError) as error:
        read(samples)
    assert str(error.value).endswith(
        f"is {kind_format.what} in format {kind_format.number + 1}, and clearhead {__version__} reads up to "
        f"{kind_format.number}: install clearhead 7.8.9"
    )
    for number, reason in ((None, f"has no format number, as {kind_format.what}"), (0, "has no format number")):
        change(samples, number)
        with pytest.raises(InputError, match=reason) as error:
            read(samples)
        assert str(error.value).endswith(kind_format.mend) and "\n" not in str(error.value)


def test_a_run_of_a_later_version_is_left_as_it_is(samples: Path) -> None:
    in_json(f"run/{FORMAT_FILE}")(samples, RUN_FORMAT.number + 1)
    before = {path: path.read_bytes() for path in samples.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"install clearhead 7\.8\.9"):
        open_run(samples / "run", resume=True)
    assert {path: path.read_bytes() for path in samples.rglob("*") if path.is_file()} == before


def test_older_content_is_read_down_to_the_oldest_format() -> None:
    example_format = FileFormat("a thing", 3, "make it again", oldest=2)
    for header in ({"format": 2}, example_format.header()):
        example_format.check(header, "thing")
    with pytest.raises(InputError, match=r"^thing is a thing in format 1, which is no longer read; make it again$"):
        example_format.check({"format": 1}, "thing")
    forged = {"format": 4, "clearhead": "\x1b[2J or any other text"}
    with pytest.raises(InputError, match=r"reads up to 3: install a newer clearhead$"):
        example_format.check(forged, "thing")


def shape(folder: Path) -> set[str]:
    """Return the names of files, JSON keys, tensors and arrays in a folder, with their types."""
    entries = set()
    for path in filter(Path.is_file, folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        entries.add(name)
        if path.suffix == ".json" and "tokenizer" not in name and path.parent.name != "origin":
            entries |= {f"{name}: {key}" for key in keys(json.loads(path.read_text("utf-8")))}
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                entries |= {f"{name}: {key} {file.get_slice(key).get_dtype()}" for key in file.keys()}  # noqa: SIM118
        if path.suffix == ".npz":
            entries |= {f"{name}: {key} {array.dtype.kind} {array.ndim}" for key, array in np.load(path).items()}
    return entries


def keys(content: Any, prefix: str = "") -> set[str]:
    if not isinstance(content, dict):
        return {f"{prefix}: {type(content).__name__}"}
    return {name for key, value in content.items() for name in keys(value, f"{prefix}.{key}")}


@pytest.mark.usefixtures("quick_trainings")
def test_this_version_writes_what_the_samples_hold(tmp_path: Path) -> None:
    """If this fails, raise the number of the format, and make new samples with the script."""
    make(tmp_path / "made")
    assert shape(tmp_path / "made") == shape(SAMPLES)
