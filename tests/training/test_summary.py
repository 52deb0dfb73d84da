"""What a finished run says to do next."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer

from clearhead.apps.cli.main import make_app
from clearhead.training.record import RunResult
from clearhead.training.runfile.read import parse_run_file
from clearhead.training.summary import next_commands, summary_lines

PAIRS = 'train = { source = "a b.de", target = "a.en" }\nvalid = { source = "a b.de", target = "a.en" }'
TEXT = 'train = { text = "a b.jsonl" }\nvalid = { text = "a b.jsonl" }'
LABELLED = 'train = { text = "a b.tsv", labels = "label" }\nvalid = { text = "a b.tsv", labels = "label" }'
FORMS = {"translate": PAIRS, "embed": PAIRS, "classify": LABELLED}
KINDS = ("translate", "generate", "fill", "denoise", "classify", "tag", "embed", "answer")


@pytest.mark.parametrize("kind", KINDS)
def test_every_task_is_measured_and_used_by_commands_that_exist(kind: str) -> None:
    data = f'[task]\nkind = "{kind}"\n[data]\n{FORMS.get(kind, TEXT)}\n'
    text = f'{data}[tokenizer]\nkind = "word"\n[train]\nrun = "my run"\nsteps = 3\n'
    commands = [shlex.split(command) for command in next_commands(Path("my run"), parse_run_file(text, "run.toml"))]
    # A denoising model is for other tasks to start from.
    assert [words[1] for words in commands] == ["evaluate", "new" if kind == "denoise" else kind]
    known = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
    known |= {"new": known["new"].commands["translate"]}
    for words in commands:
        assert words[0] == "clearhead" and words[-1 if words[1] == "new" else 2] == "my run"
        options = {name for option in known[words[1]].params for name in option.opts}
        assert {word for word in words if word.startswith("--")} <= options
        assert words[1] != "evaluate" or words[3:] == []
        needed = {
            option.opts[0]
            for option in known[words[1]].params
            if option.required and option.param_type_name == "option"
        }
        assert needed <= set(words)


@pytest.mark.parametrize(
    ("planned", "step", "seconds", "is_said"),
    [
        ("planned_minutes = 3", 116, 88.0, True),
        ("planned_minutes = 3", 116, 170.0, False),
        ("planned_minutes = 3", 90, 60.0, False),  # ended early, which has another reason
        ("", 116, 88.0, False),
    ],
)
def test_a_run_much_shorter_than_planned_says_how_to_make_it_longer(
    planned: str, step: int, seconds: float, is_said: bool
) -> None:
    data = f'[task]\nkind = "generate"\n[data]\n{TEXT}\n[tokenizer]\nkind = "word"\n'
    run_file = parse_run_file(f'{data}[train]\nrun = "my run"\nsteps = 116\n{planned}\n', "run.toml")
    result = RunResult(Path("my run"), step, None, None, seconds, "all 116 steps are done")
    notices = [line for line in summary_lines(result, run_file) if line.startswith("shorter")]
    assert len(notices) == is_said
    if is_said:
        assert "116 steps took 1 min 28 s of the 3 min planned" in notices[0]
        words = shlex.split(notices[0].partition("all of it: ")[2])
        assert words == ["clearhead", "train", "my run/run.toml", "train.steps=224", "train.run=my run-longer"]
