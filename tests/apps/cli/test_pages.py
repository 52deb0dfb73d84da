"""The commands of each page of the documentation run in their order, with the files and runs that the page names."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clearhead.apps.cli.main import main
from tests import hf_models
from tests.apps.cli.tiny_run import train, write_run_file
from tests.apps.cli.tiny_tasks import LINES, write_lines, write_questions
from tests.base.test_commands import EXTENSION
from tests.house.source import ROOT, repository_files
from tests.training import quick

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(os.name == "nt", reason="the commands are those of a POSIX shell"),
]

DOCS = [path for path in repository_files() if path.is_relative_to(ROOT / "docs") and path.suffix == ".md"]
# Without the pages that a build of the site generates.
PAGES = [path for path in DOCS if "clearhead " in path.read_text("utf-8")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:    |\.venv/bin/)?(clearhead .*(?:\\\n.*)*)", re.MULTILINE)
# Training takes two steps of a small model; other commands run as they are written.
SMALL = ["train.steps=2", "train.validate_every=1", "train.warmup=1"]
SIZES = ["model.width=16", "model.feedforward=8", "model.layers=1", "model.heads=2"]

NOT_RUN = {
    r"clearhead demo": "takes a minute each; tests/apps/demo and the wheel's proof run them",
    r"clearhead (new|evaluate) .*hf:": "needs the Hugging Face hub",
    r"clearhead train examples/tinyshakespeare.toml": "needs the Hugging Face hub for the tokenizer's data",
    r".*--push|clearhead translate owner/": "needs the Hugging Face hub",
    r"clearhead translate path/to/nllb": "needs a multilingual checkpoint; tests/parity/architectures runs them",
    r"clearhead convert path/to/old": "needs a checkpoint with pickled weights; tests/apps/cli/test_convert.py runs it",
    r"clearhead serve|.*--serve": "runs until it is stopped; tests/apps/serve run them",
    r"clearhead check [\w/]+\.(py|ipynb)": "checks a module of the reader; tests/apps/check run them",
    r"clearhead check [\w-]+\.toml": "kills a training several times; tests/apps/check/job run it",
    r"clearhead bench": "measures for half a minute; tests/apps/cli/test_bench.py runs it",
    r"clearhead (convert |generate |answer )?(runs/)?(digits|reader|count)\b": (
        "reads checkpoints that the Python of the page makes; tests/apps/cli/test_coming_from.py runs it"
    ),
    r"clearhead --install-completion": "changes the start of the reader's shell",
    r"clearhead (new rate|evaluate runs/ratings-rate|predict runs/ratings-rate|convert runs/ratings-rate)": (
        "needs the package of the page; tests/tasks/ninth run them"
    ),
    r"clearhead new generate --text stories.parquet": "needs a Parquet file, as in tests/apps/cli/test_new_datasets",
    r"clearhead .*--device cuda": "needs a GPU; tests/laws/test_devices.py trains and generates on one",
    r"clearhead train run.toml$": "is a placeholder: the run file of the reader",
    r"clearhead train run.toml --sweep": "trains six runs, each in a process; tests/apps/sweeps run sweeps",
    r"clearhead generate runs/shakespeare-recurrence": "needs the trained example; tests/examples run its parts",
}


@dataclass(frozen=True)
class Reader:
    """The runs and checkpoints that a reader of a page has: their names -> the kinds of tiny models in their place."""

    models: dict[str, str] = field(default_factory=dict)


READERS = {
    "docs/checkpoints.md": Reader({"path/to/model": "gpt2"}),
    "docs/coming-from/transformers.md": Reader({"path/to/checkpoint": "gpt2"}),
    "docs/guides/add-an-architecture.md": Reader({"path/to/checkpoint": "gpt2"}),
    "docs/guides/attention.md": Reader({"runs/demo": "demo", "runs/de-en": "translate"}),
    "docs/guides/check-a-model.md": Reader({"runs/de-en": "translate", "path/to/checkpoint": "gpt2"}),
    "docs/guides/diff.md": Reader({"runs/demo": "demo"}),
    "docs/guides/explain.md": Reader({"runs/demo": "demo"}),
    "docs/guides/fine-tune.md": Reader({"stories260K": "gpt2"}),
    "docs/guides/many-texts.md": Reader({"runs/de-en": "translate"}),
    "docs/guides/share-a-model.md": Reader({"runs/de-en": "translate"}),
    "docs/guides/tour.md": Reader({"path/to/stories260K": "gpt2", "runs/stories": "gpt2", "path/to/reader": "answer"}),
    "docs/guides/view.md": Reader({"runs/demo": "translate"}),
    "docs/start/index.md": Reader({"runs/demo": "translate"}),
}


def commands_of(page: Path) -> list[str]:
    """Return the command lines of clearhead in the shell blocks and the indented lines of a page."""
    text = page.read_text("utf-8")
    blocks = [content for language, content in BLOCK.findall(text) if language == "sh"]
    indented = re.findall(r"^    clearhead .*$", BLOCK.sub("", text), re.MULTILINE)
    lines = [line.replace("\\\n", " ") for line in COMMAND.findall("\n".join([*blocks, *indented]))]
    return [" ".join(line.partition(" #")[0].split()) for line in lines]


def reason_of(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), None)


def write_reader_files(page: Path, folder: Path) -> None:
    """Write the texts that commands name: the content is small, the names are those of the pages."""
    for name in (
        "shakespeare.txt",
        "mine.de",
        "train.de",
        "train.en",
        "mine.en",
        "test.de",
        "test.en",
        "dates.txt",
        "large.de",
    ):
        lines = LINES[:5] if name in ("test.de", "test.en", "dates.txt", "large.de") else LINES
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for name in ("train", "dev"):
        written = write_questions(folder, name, [line.rstrip(".") for line in LINES[:40]])
        records = [json.loads(line) for line in written.read_text("utf-8").splitlines()]
        paragraphs = [
            {
                "context": record["context"],
                "qas": [
                    {
                        "id": str(number),
                        "question": record["question"],
                        "is_impossible": record["answer"] is None,
                        "answers": []
                        if record["answer"] is None
                        else [{"text": record["answer"], "answer_start": record["start"]}],
                    }
                ],
            }
            for number, record in enumerate(records)
        ]
        content = {"version": "v2.0", "data": [{"title": "letters", "paragraphs": paragraphs}]}
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "letter.txt").write_text("a m u\n", encoding="utf-8")
    # The run file that the page shows.
    shown = [content for language, content in BLOCK.findall(page.read_text("utf-8")) if language == "toml"]
    if shown and "[task]" in shown[0]:
        (folder / "story.toml").write_text(shown[0], encoding="utf-8")


def run_line(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line; its pipe ends in nothing, and its files are read and left out."""
    words = shlex.split(command, comments=True)[1:]
    words = words[: words.index("|")] if "|" in words else words
    for sign in (">", "<"):
        if sign in words:
            at = words.index(sign)
            if sign == "<":
                content = Path(words[at + 1]).read_bytes()
                monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
            words = words[:at]
    if words[0] == "train" and "--sweep" not in words:
        text = Path(words[1]).read_text("utf-8")
        words += [*SMALL, "data.max_length=32"] if "\ninit" in text else [*SMALL, *SIZES]
    return main(words)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator with the layers and heads of the demo."""
    folder = tmp_path_factory.mktemp("demo")
    train(write_run_file(folder), "model.layers=2", "model.heads=4", "model.width=16")
    return folder / "run"


def test_the_reasons_hold_for_lines_that_exist() -> None:
    lines = [command for page in PAGES for command in commands_of(page)]
    assert len(lines) > 70
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in lines)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_run_in_order(
    page: Path,
    trained: Path,
    demo: Path,
    runs: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    commands = [command for command in commands_of(page) if reason_of(command) is None]
    if not commands:
        return
    quick.leave_out(monkeypatch)
    monkeypatch.chdir(tmp_path)
    write_reader_files(page, tmp_path)
    for name, kind in READERS.get(page.relative_to(ROOT).as_posix(), Reader()).models.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if kind == "gpt2":
            hf_models.language_model(tmp_path / name)
        else:
            real_refs = {"translate": trained / "run", "demo": demo}
            shutil.copytree(real_refs[kind] if kind in real_refs else runs(kind), tmp_path / name)
    for command in commands:
        capfd.readouterr()
        code = run_line(command, monkeypatch)
        # A check may find something wrong with a model of two steps.
        assert code == 0 or (code == 1 and command.startswith("clearhead check")), (command, capfd.readouterr().err)


def test_the_next_commands_of_a_run_with_an_extension_run_in_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quick.leave_out(monkeypatch)
    (tmp_path / "mine.py").write_text(EXTENSION.replace("CommandScale", "PageScale"), encoding="utf-8")
    write_lines(tmp_path / "text.txt", LINES)
    (tmp_path / "run.toml").write_text(
        '[task]\nkind = "generate"\n[data]\ntrain = { text = "text.txt" }\nvalid = { text = "text.txt" }\n'
        'max_length = 16\n[tokenizer]\nkind = "character"\n[model]\nparts = "mine.py"\n'
        'own_norm = { kind = "page_scale", by = 1.0 }\nlayers = 1\nwidth = 16\nheads = 2\nfeedforward = 8\n'
        '[train]\nrun = "runs/own"\nsteps = 2\nbatch_tokens = 64\n',
        encoding="utf-8",
    )
    assert main(["train", "run.toml"]) == 0
    notices = capfd.readouterr().err.splitlines()
    at = next(index for index, line in enumerate(notices) if line.startswith("next"))
    commands = [line.removeprefix("next").strip() for line in notices[at : at + 2]]
    assert commands == [
        "clearhead evaluate runs/own --parts mine.py",
        "clearhead generate runs/own --prompt TEXT --parts mine.py",
    ]
    for command in commands:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
