"""Faults of custom modules are reported in one sentence, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core.extensions.files import load_parts, parts_options
from clearhead.core.extensions.trial import try_parts
from clearhead.training.runfile.model_table import with_extensions
from clearhead.training.runfile.read import parse_run_file
from clearhead.training.runfile.sections import ModelSection
from tests.laws.tiny import hparams, resolve_spec

HEAD = """
import dataclasses, random
from dataclasses import dataclass
import torch
from torch import nn
import clearhead as ch
"""
PART = """
@dataclass(frozen=True)
class NAME:
    size: int = 3
@ch.register(NAME)
class Module(nn.Module):
    def __init__(self, width, part):
        super().__init__()
        self.out = nn.Linear(width, width)
        self.generator = torch.Generator()
    def forward(self, x, context):
        return RETURNED
"""
FORWARDS = {
    "narrow": ("self.out(x)[..., :3]", r"returns torch.float32 \[2, 5, 3\] for x \[2, 5, 14\]; as the function of a b"),
    "listed": ("[x]", "returns list for x"),
    "noisy": ("x + torch.randn_like(x)", "draws random numbers in evaluation, or its result depends on earlier calls"),
    "drawing": (
        "x + torch.rand(1, generator=self.generator) if self.training else x",
        "draws its own random numbers in training, so a resumed run would not be exact",
    ),
    "failing": ("x @ torch.ones(3, 3)", r"the module 'failing': its forward fails for x \[2, 5, 14\] \(RuntimeError: "),
}
FILES = {
    "nothing": ("a = 1\n", "nothing.py: it registers no custom module; put @clearhead.register"),
    "syntax": ("def f(:\n", r"syntax.py: it cannot be imported: SyntaxError: .*\(line 1\)"),
    "raises": ("\n\nprint(missing)\n", r"it cannot be imported: NameError: name 'missing' is not defined \(line 3\)"),
    "exits": ("raise SystemExit(3)\n", "it cannot be imported: SystemExit: 3"),
    "melting": (PART.replace("(frozen=True)", ""), "frozen dataclass: put @dataclass.frozen=True. above melting"),
    "attention": (PART, "the name 'attention' of a custom module is taken by clearhead: give its dataclass another"),
    "holding": (PART.replace("size: int = 3", "size: torch.Tensor"), "the dataclass Holding cannot be written as JSON"),
    "acting": (PART.replace("size: int = 3", "size: type"), "the dataclass Acting cannot be written as JSON"),
    "standing": (PART.replace("ch.register(NAME)", "ch.register(NAME, 'roof')"), r"standing\.py: .*role.*roof"),
}  # fmt: skip


def write_file(folder: Path, name: str, text: str, returned: str = "x") -> Path:
    path = folder / f"{name}.py"
    path.write_text(HEAD * ("NAME" in text) + text.replace("NAME", name.capitalize()).replace("RETURNED", returned))
    return path


def mix_spec(kind: str, **values: object) -> spec.Model:
    section = ModelSection(mixer={"kind": kind, **values})
    return with_extensions(resolve_spec(hparams("decoder/post/rotary")), section)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_trial_tells_what_its_forward_does_wrong(tmp_path: Path, name: str) -> None:
    returned, sentence = FORWARDS[name]
    load_parts(write_file(tmp_path, name, PART, returned))
    with pytest.raises(InputError, match=sentence) as error:
        try_parts(mix_spec(name))
    assert len(error.value.lines) == 1


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused(tmp_path: Path, name: str) -> None:
    text, sentence = FILES[name]
    path = write_file(tmp_path, name, text)
    with pytest.raises(InputError, match=sentence) as error:
        load_parts(path)
    assert len(error.value.lines) == 1
    assert str(path) not in parts_options()


def test_a_process_started_after_an_edit_gets_the_file_once(tmp_path: Path) -> None:
    path = write_file(tmp_path, "edited", PART)
    for returned in ("x", "2 * x"):
        load_parts(write_file(tmp_path, "edited", PART, returned))
    assert parts_options().count(str(path)) == 1


def test_a_value_that_is_no_json_is_refused(tmp_path: Path) -> None:
    load_parts(write_file(tmp_path, "loose", PART.replace("size: int = 3", "size: object = None")))
    with pytest.raises(InputError, match=r"size cannot be written as JSON: \[1\]; use numbers, text, truth values"):
        mix_spec("loose", size=[1])


def test_a_missing_file_and_one_of_a_model_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path, "mine", PART)
    with pytest.raises(InputError, match=r"mnie\.py.*did you mean .*mine\.py"):
        load_parts(tmp_path / "mnie.py")
    (tmp_path / "model.safetensors").touch()
    marker = tmp_path / "imported"
    (tmp_path / "code").mkdir()
    evil = write_file(tmp_path / "code", "evil", f"open({str(marker)!r}, 'w')\n")
    for path in (evil, tmp_path / "mine.py"):
        with pytest.raises(InputError, match=r"lies in the folder of a model, .* from which no code is imported"):
            load_parts(path)
    assert not marker.exists()


def test_a_run_directory_is_known_by_its_checkpoints(tmp_path: Path) -> None:
    path = write_file(tmp_path, "trained", PART)
    (tmp_path / "checkpoints").mkdir()  # also a source folder may be called so
    load_parts(path)
    path = write_file(tmp_path, "trained", PART, "2 * x")
    (tmp_path / "checkpoints" / "step-5").mkdir()
    with pytest.raises(InputError, match="lies in the folder of a model"):
        load_parts(path)


def test_a_name_is_taken_by_another_file_but_not_by_the_same(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    load_parts(write_file(tmp_path, "twice", PART))
    load_parts(write_file(tmp_path, "twice", PART, "2 * x"))
    with pytest.raises(InputError, match=r"the name 'twice' of a custom module is taken by twice\.py: give"):
        load_parts(write_file(other, "twice", PART, "3 * x"))


def test_a_spec_is_refused_without_its_file_and_with_another(tmp_path: Path) -> None:
    load_parts(write_file(tmp_path, "kept", PART))
    text = mix_spec("kept").to_json()
    with pytest.raises(
        InputError, match=r"needs the custom module 'gone' of kept\.py \(SHA-256 \w{12}\), which is not loaded"
    ):
        spec.Model.from_json(text.replace('"kept"', '"gone"'))
    load_parts(write_file(tmp_path, "kept", PART, "2 * x"))
    with pytest.raises(InputError, match=r"was made with another version of kept\.py: .*; restore the file"):
        spec.Model.from_json(text)


def test_an_installed_package_has_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path, "packed", PART, "self.out(x)")
    monkeypatch.syspath_prepend(tmp_path)
    points = [metadata.EntryPoint(name, f"{name}:Module", "clearhead.parts") for name in ("packed", "absent")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point for point in points if point.group == group])
    try_parts(mix_spec("packed"))
    with pytest.raises(
        InputError, match=r"the custom module 'absent' of absent:Module cannot be imported .ModuleNotFoundError"
    ):
        mix_spec("absent")


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "text.txt").write_text("a text\n" * 9)
    tables = f"""
    [task]
    kind = "generate"
    [data]
    train = {{ text = "{tmp_path}/text.txt" }}
    valid = 0.5
    [tokenizer]
    kind = "byte"
    [train]
    run = "{tmp_path}/run"
    steps = 3
    [model]
    width = 14
    heads = 2
    """
    return lambda model: tables + model


def test_a_run_file_is_refused_before_anything_runs(tmp_path: Path, run_file: Callable[[str], str]) -> None:
    for name in ("slim", "good"):
        write_file(tmp_path, name, PART, "x[..., :3]" if name == "slim" else "self.out(x)")
    parts = f'parts = "{tmp_path}/slim.py"\n'
    for model, sentence in {
        parts + 'mixer = { kind = "slim" }': r"the module 'slim' returns torch.float32 \[2, 5, 3\]",
        parts + 'mixer = { kind = "slim", siz = 3 }': "siz: unknown key .did you mean 'size'",
        parts + 'mixer = { kind = "slime" }': "kind must be one of .*; got 'slime'",
        'mixer = "slim"': r"mixer must be a table of a custom module with its kind, such as .*, got the text 'slim'",
        f'parts = "{tmp_path}/none.py"': r"none\.py",
    }.items():
        with pytest.raises(InputError, match=sentence) as error:
            parse_run_file(run_file(model), "run.toml")
        assert len(error.value.lines) == 1, str(error.value)
    assert not (tmp_path / "run").exists()
    good = parse_run_file(run_file(f'parts = "{tmp_path}/good.py"\nmixer = {{ kind = "good" }}'), "run.toml")
    assert good.model.mixer == {"kind": "good"}
