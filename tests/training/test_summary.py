"""What a finished run says to do next."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer

from clearhead.cli.main import make_app
from clearhead.training.runfile.read import parse_run_file
from clearhead.training.summary import next_commands

PAIRS = 'train = { source = "a b.de", target = "a.en" }\nvalid = { source = "a b.de", target = "a.en" }'
TEXT = 'train = { text = "a b.jsonl" }\nvalid = { text = "a b.jsonl" }'
LABELLED = 'train = { text = "a b.tsv", labels = "label" }\nvalid = { text = "a b.tsv", labels = "label" }'
FORMS = {"translate": PAIRS, "embed": PAIRS, "classify": LABELLED}
KINDS = ("translate", "generate", "fill", "denoise", "classify", "tag", "embed", "answer")


@pytest.mark.parametrize("kind", KINDS)
def test_every_task_is_measured_and_used_by_commands_that_exist(kind: str) -> None:
    data = f'[task]\nkind = "{kind}"\n[data]\n{FORMS.get(kind, TEXT)}\n'
    text = f'{data}[tokenizer]\nkind = "word"\n[train]\nrun = "my run"\nsteps = 3\n'
    commands = [shlex.split(one) for one in next_commands(Path("my run"), parse_run_file(text, "run.toml"))]
    # A denoising model is for other tasks to start from.
    assert [words[1] for words in commands] == ["evaluate", "new" if kind == "denoise" else kind]
    known = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
    known |= {"new": known["new"].commands["translate"]}
    for words in commands:
        assert words[0] == "clearhead" and words[-1 if words[1] == "new" else 2] == "my run"
        options = {name for one in known[words[1]].params for name in one.opts}
        assert {word for word in words if word.startswith("--")} <= options
        needed = {one.opts[0] for one in known[words[1]].params if one.required and one.param_type_name == "option"}
        assert needed <= set(words)
