"""Uses of a changed folder: by the Python API, or by one command line."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import clearhead as ch
from clearhead.apps.cli import main as command_line
from clearhead.apps.compare.runs import read_run
from clearhead.base.errors import InputError

TEXT = "the cat sat on a mat"
LINES = [TEXT, "a small dog", "x" * 200]
# CASE, OUT and the texts stand for paths.
_ANY = (["inspect", "CASE"], ["inspect", "CASE", "--addresses", "--json"], ["convert", "CASE", "OUT", "--to", "hf"])
_AGAINST = (["check", "CASE", "--against", "transformers"],)
_VIEWS = (["view", "CASE", TEXT, "-o", "OUT.html"],)
_GENERATES = (
    ["generate", "CASE", "--prompt", TEXT, "--max-new-tokens", "3"],
    ["generate", "CASE", "--prompt", TEXT, "--chat"],
    ["evaluate", "CASE", "--text", "TEXTS"],
    *_VIEWS,
    ["train", "FILE.toml", "task.init=CASE"],
)
_TRANSLATES = (
    ["translate", "CASE", "TEXTS", "--n-best", "2"],
    ["evaluate", "CASE", "--source", "TEXTS", "--target", "TEXTS"],
    ["heads", "CASE", "TEXTS", "--target", "TEXTS"],
)
COMMANDS: dict[str, tuple[list[str], ...]] = {
    "decoder": (*_ANY, *_GENERATES, *_AGAINST),
    "shards": (*_ANY, *_GENERATES),
    "pickled": (["convert", "CASE", "OUT", "--from-bin"],) * 3 + (["inspect", "CASE"],),
    "translator": (*_ANY, *_TRANSLATES, *_AGAINST),
    "encoder": (
        *_ANY,
        *_AGAINST,
        ["embed", "CASE", "TEXTS"],
        ["heads", "CASE", "TEXTS"],
        ["view", "CASE", TEXT, "-o", "OUT.html"],
    ),
    "saved": (*_ANY, *_TRANSLATES),
    "run": (
        *_ANY,
        ["generate", "CASE@last", "--prompt", TEXT, "--max-new-tokens", "3"],
        ["generate", "CASE@averaged", "--prompt", TEXT, "--max-new-tokens", "3"],
        ["average", "CASE", "--last", "2"],
        ["compare", "CASE", "CASE", "-o", "OUT.svg"],
        ["view", "CASE", TEXT, "--checkpoints", "-o", "OUT.html"],
        *([["train", "CASE", "--resume", "train.steps=6"]] * 3),
    ),
}
"""The command lines that are tried with each kind of folder."""

CODES = (0, 1, 2)


class Fault(Exception):
    """A fault of a command line, such as an unexpected exit code."""


def prepare(folder: Path) -> None:
    """Write the other files that the command lines need."""
    (folder / "outside").write_text("from outside")
    (folder / "texts").write_text("".join(f"{line}\n" for line in LINES))
    data = "".join(f'{name} = {{ text = "{folder}/texts", document = "line" }}\n' for name in ("train", "valid"))
    train = 'steps = 1\nbatch_tokens = 60\nprecision = "fp32"\nthreads = 1\ndevice = "cpu"\n'
    run = f'[task]\nkind = "generate"\n[data]\n{data}max_length = 24\n[train]\nrun = "{folder}/out"\n{train}'
    (folder / "file.toml").write_text(run)


def draw_use(folder: Path, kind: str, draw: random.Random) -> tuple[str, Callable[[], None]]:
    """Choose a use of a case; return its description and a function.

    Args:
        folder: the folder with the case and the files of `prepare`.
        kind: the kind of the case.
        draw: the generator of random choices.
    """
    if draw.random() < 0.4 and kind != "pickled":
        return "python", lambda: use(folder / "case")
    words = draw.choice(COMMANDS[kind])
    paths = {"CASE": "case", "OUT": "out", "TEXTS": "texts", "FILE.toml": "file.toml"}
    words = [word.replace(*pair) if pair[0] in word else word for word in words for pair in [_pair(word, paths)]]
    return " ".join(words), lambda: command(words, folder)


def _pair(word: str, paths: dict[str, str]) -> tuple[str, str]:
    return next(((name, path) for name, path in paths.items() if name in word), (word, word))


def use(folder: Path) -> None:
    """Load a model and use it for its task."""
    if (folder / "checkpoints").is_dir():
        read_run(folder)
    model = ch.load(folder, device="cpu", precision="fp32")
    match model.task.kind:
        case "embed":
            model.embed(LINES)
        case "translate":
            model.translate(LINES)
        case "classify":
            model.classify(LINES)
        case _:
            model.generate(TEXT, max_new_tokens=3)
            has_chat = model.hf_checkpoint is not None and model.hf_checkpoint.tokenizers.chat is not None
            model.generate(TEXT, chat=has_chat, max_new_tokens=3, temperature=0)


def command(words: Sequence[str], folder: Path) -> None:
    """Run one command line.

    Args:
        words: the arguments of the program.
        folder: the folder with the case, and with the files `stdout` and `stderr` of the process.

    Raises:
        InputError: the command refused its input, as it should.
        Fault: another failure.
    """
    unexpected: list[Exception] = []
    original = command_line._report_unexpected

    def note(error: Exception, debug: bool) -> int:
        unexpected.append(error)
        return original(error, debug)

    command_line._report_unexpected = note  # type: ignore[assignment]
    before = set(folder.iterdir())
    code = command_line.main(words)
    if unexpected:
        raise unexpected[0]
    messages = (folder / "stderr").read_text(errors="replace")
    if code not in CODES or "Traceback" in messages or "\x1b" in messages:
        raise Fault(f"code {code}: {messages[-300:]}")
    if code != 0 and "clearhead" not in messages:
        raise Fault(f"code {code} without a message: {messages[-300:]}")
    if code != 0 and set(folder.iterdir()) != before:
        raise Fault(f"code {code}, but files are left: {sorted(set(folder.iterdir()) - before)}")
    if code == 2:
        raise InputError("refused")
