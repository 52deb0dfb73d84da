"""Files of a model must be regular, limited in size, inside their folder, and safe JSON."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from clearhead.base import files
from clearhead.base.errors import InputError
from clearhead.base.files import explain_absent, parse_json, read_json, read_model_file, read_typed, runs_nearby


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputError, match="is no regular file"):
        read_json(tmp_path / "config.json", what="a config.json")


def test_a_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no regular file"):
        read_model_file(Path("/dev/zero"), what="a vocabulary")
    with pytest.raises(InputError, match=r"regular file|cannot be read"):
        read_model_file(tmp_path, what="a vocabulary")


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('"123456789"')
    assert read_json(tmp_path / "a.json", what="text", largest=11) == "123456789"
    (tmp_path / "a.json").write_text('"1234567890"')
    with pytest.raises(InputError, match="got a file of 12 bytes"):
        read_json(tmp_path / "a.json", what="text", largest=11)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 5000, "nested too deeply"),
        ("[" * 101 + "]" * 101, "nested too deeply"),
        ('{"a":' * 101 + "0" + "}" * 101, "nested too deeply"),
        ("9" * 41, "too many digits"),
        ("-" + "9" * 5000, "too many digits"),
        ("[1e999]", "1e999 is not a finite number"),
        ("[-Infinity]", "-Infinity is not a finite number"),
        ('{"a": NaN}', "NaN is not a finite number"),
        (r'["\ud83d"]', "lone surrogate"),
        (r'{"\ud83d": 1}', "lone surrogate"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice"),
        ("[" + "[]," * files.MOST_CONTAINERS + "0]", "too many lists"),
        ("[" + '"",' * (files.MOST_QUOTES // 2) + '""]', "too many lists, objects and strings"),
        (
            f'{{{",".join(f"{chr(34)}{number}{chr(34)}:0" for number in range(10**5))},"99999":0}}',
            "'99999' occurs twice",
        ),
    ],
)
def test_json_that_no_honest_file_holds_is_refused(text: str, words: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=words):
        parse_json(text)


def test_json_of_honest_files_is_read() -> None:
    text = (
        "[" * 99
        + r'{"model_max_length": 1000000000000000019884624838656, "smile": "\ud83d\ude00", "e": 1e-300}'
        + "]" * 99
    )
    content = parse_json(text)
    for _ in range(99):
        (content,) = content
    assert content == {"model_max_length": 1000000000000000019884624838656, "smile": "\U0001f600", "e": 1e-300}


@dataclass(frozen=True)
class Sizes:
    """A type of content."""

    width: int
    heads: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"width": "8"}', "width: expected a valid integer, got '8'"),
        ('{"width": 8.5}', "width: expected .*got 8.5"),
        ('{"width": true}', "width: expected a valid integer, got True"),
        ('{"heads": [1, null]}', r"2 faults(?s:.*)width(?s:.*)heads\.1"),
        ("[]", "one JSON object"),
    ],
)
def test_a_type_is_not_converted_to(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=words):
        read_typed(tmp_path / "a.json", Sizes, what="sizes")
    (tmp_path / "a.json").write_text('{"width": 8, "heads": [1, 2], "other": {}}')
    assert read_typed(tmp_path / "a.json", Sizes, what="sizes") == Sizes(8, (1, 2))


def test_links_are_followed_within_the_folder_and_into_the_cache_of_the_hub_only(tmp_path: Path) -> None:
    snapshot, blobs, secret = tmp_path / "hub" / "snapshots" / "r1", tmp_path / "hub" / "blobs", tmp_path / "secret"
    for folder in (snapshot / "templates", blobs):
        folder.mkdir(parents=True)
    (blobs / "0f").write_text("1")
    secret.write_text("2")
    (snapshot / "a.json").symlink_to(Path("../../blobs/0f"))
    (snapshot / "templates" / "b.json").symlink_to(Path("../../../blobs/0f"))
    (snapshot / "c.json").symlink_to(secret)
    (snapshot / "d.json").symlink_to("e.json")
    (snapshot / "e.json").symlink_to("d.json")
    assert read_json(snapshot / "a.json", what="a") == read_json(snapshot / "templates" / "b.json", what="b") == 1
    with pytest.raises(InputError, match="a link out of the folder is not followed"):
        read_json(snapshot / "c.json", what="c")
    with pytest.raises(InputError, match=r"lead in a circle|cannot be read"):
        read_json(snapshot / "d.json", what="d")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice"),
        ("[" * 100_000 + "]" * 100_000, "its values are nested too deeply"),
        ("9" * 5000, "a number has too many digits"),
        ("{", "expected a config.json in JSON"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_json_of_a_stranger_is_refused_in_one_sentence(text: str | bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=words) as caught:
        read_json(tmp_path / "config.json", what="a config.json")
    assert "\n" not in str(caught.value)


def test_a_path_to_nothing_is_named_with_the_folder_where_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/de-en", "runs/words", "data", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "train.de").touch()
    (tmp_path / "lost").symlink_to("nowhere")
    for path, end in {
        "zebra.txt": f"{tmp_path} has no 'zebra.txt'",
        "tooth": f"{tmp_path} has no 'tooth'",  # "other" shares three of its letters
        "data/train.dee": f"{tmp_path}/data has no 'train.dee' (did you mean 'train.de'?)",
        "dat/train.de": f"{tmp_path} has no 'dat' (did you mean 'data'?)",
        "data/../dat/train.de": f"{tmp_path} has no 'dat' (did you mean 'data'?)",
        f"{tmp_path}/data/x/y/z": f"{tmp_path}/data has no 'x'",
        "data/train.de/x": f"{tmp_path}/data/train.de is a file, not a folder",
        "lost": f"'{tmp_path}/lost' is a link that leads nowhere",
        "de-en": f"{tmp_path} has no 'de-en' (did you mean 'runs/de-en'?)",
        "wrods": f"{tmp_path} has no 'wrods' (did you mean 'runs/words'?)",
    }.items():
        assert explain_absent(Path(path), "folder", runs_nearby()) == f"there is no such folder: {end}"
