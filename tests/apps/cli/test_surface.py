"""The names a script outside the repository uses: commands, options, help and exit codes."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import typer

import clearhead
from clearhead.apps.cli.main import main, make_app

MACHINE = {"--device", "--precision", "--threads", "--batch-size", "--seed"}
FILES = {"--output", "-o", "--share", "--resume", "--force"}
DATA = {"--source", "--target", "--text", "--labels", "--text-column", "--pair", "--document", "--pattern"}
PAIRS = {"--source", "--target", "--valid-source", "--valid-target"}
NEW = {"--output", "-o", "--run", "--minutes", "--init", "--force", "--json"}
SURFACE = {
    **dict.fromkeys(("new translate", "new embed"), PAIRS | NEW),
    **dict.fromkeys(
        ("new generate", "new fill", "new denoise"),
        {"--text", "--text-column", "--document", "--pattern", "--valid-text"} | NEW,
    ),
    "new classify": {"--text", "--labels", "--text-column", "--pair", "--label-kind", "--valid-text", "--valid-labels"}
    | NEW,
    **dict.fromkeys(("new tag", "new answer"), {"--text", "--valid-text"} | NEW),
    "train": {"--resume", "--sweep", "--equal", "--json"} | MACHINE,
    "translate": FILES
    | {
        "--beam-size",
        "--n-best",
        "--length-penalty",
        "--from",
        "--to",
        "--alignments",
        "--alignment-heads",
        "--json",
    }
    | MACHINE,
    "generate": FILES
    | {
        "--file",
        "--prompt",
        "--prompt-file",
        "--max-new-tokens",
        "--greedy",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--repetition-penalty",
        "--no-repeat-ngram-size",
        "--num-return-sequences",
        "--beam-size",
        "--length-penalty",
        "--stop",
        "--encoder-no-repeat-ngram-size",
        "--min-new-tokens",
        "--beyond-positions",
        "--truncate",
        "--chat",
        "--schema",
        "--task",
        "--json",
    }
    | MACHINE,
    "fill": {"--file", "--top-k", "--json"} | FILES | MACHINE,
    "classify": {"--pair", "--json"} | FILES | MACHINE,
    "predict": {"--pair", "--json"} | FILES | MACHINE,
    "tag": {"--json"} | FILES | MACHINE,
    "serve": {
        "--host",
        "--port",
        "--api-key-file",
        "--openapi",
        "--share-prefixes",
        "--beyond-positions",
        "--device",
        "--precision",
        "--threads",
    },
    "heads": {"--target", "--pair", "--from", "--to", "--sort", "--json"} | MACHINE,
    "embed": {"--pair", "--similarity", "--json"} | FILES | MACHINE,
    "answer": {"--question", "--context", "--context-file", "--file", "--top-k", "--no-answer", "--json"}
    | {"--doc-stride", "--align-to-words"}
    | FILES
    | MACHINE,
    "evaluate": {
        "--plot",
        "--window",
        "--stride",
        "--tokenize",
        "--lowercase",
        "--beam-size",
        "--length-penalty",
        "--from",
        "--to",
        "--output",
        "-o",
        "--force",
        "--json",
    }
    | DATA
    | MACHINE,
    "view": {
        "--target",
        "--generate",
        "--beam-size",
        "--layers",
        "--heads",
        "--effects",
        "--of",
        "--checkpoints",
        "--compare",
        "--compare-with",
        "--output",
        "-o",
        "--serve",
        "--port",
        "--view",
        "--stack",
        "--from",
        "--to",
        "--device",
        "--precision",
        "--threads",
        "--force",
        "--json",
    },
    "explain": {
        "--target",
        "--stack",
        "--layer",
        "--head",
        "--token",
        "--output",
        "-o",
        "--from",
        "--to",
        "--device",
        "--precision",
        "--threads",
        "--force",
        "--json",
    },
    "compare": {"--output", "-o", "--force", "--json"},
    "diff": {
        "--file",
        "--output",
        "-o",
        "--fail-above",
        "--device",
        "--precision",
        "--threads",
        "--force",
        "--json",
    },
    "average": {"--last", "--json"},
    "convert": {"--to", "--from-bin", "--tokenizer", "--precision", "--max-shard-size", "--push", "--json", "--text"},
    "check": {
        "--against",
        "--reference",
        "--tolerance",
        "--hint",
        "--width",
        "--heads",
        "--as",
        "--time-limit",
        "--steps",
        "--kills",
        "--html",
        "--force",
        "--json",
    }
    | MACHINE,
    "bench": {"--json"} | MACHINE,
    "inspect": {"--addresses", "--svg", "--force", "--length", "--json"},
    "learn": {"--exercise", "--out", "--plain"},
    "doctor": {"--json"},
}
ARGUMENTS = {
    "train": ["file", "overrides"],
    "translate": ["ref", "file"],
    "generate": ["ref"],
    "fill": ["ref", "text"],
    "classify": ["ref", "file"],
    "predict": ["ref", "file"],
    "tag": ["ref", "file"],
    "embed": ["ref", "file"],
    "answer": ["ref"],
    "evaluate": ["ref"],
    "view": ["ref", "text"],
    "explain": ["ref", "text"],
    "compare": ["runs"],
    "diff": ["a", "b", "texts"],
    "average": ["run"],
    "convert": ["ref", "out"],
    "check": ["ref", "settings"],
    "bench": ["ref"],
    "inspect": ["ref"],
    "heads": ["ref", "file"],
    "serve": ["refs"],
    "learn": ["number"],
}


def commands() -> dict[str, Any]:
    """Return every command, and the subcommands of groups, by the words that call it."""
    every = dict(typer.main.get_command(make_app()).commands)  # type: ignore[attr-defined]
    for name, command in list(every.items()):
        every |= {f"{name} {task}": subcommand for task, subcommand in getattr(command, "commands", {}).items()}
    return every


def test_commands_are_these() -> None:
    assert set(commands()) == {*SURFACE, "demo", "new"}


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_options_are_these(name: str) -> None:
    parameters = commands()[name].params
    options = {opt for parameter in parameters if parameter.param_type_name == "option" for opt in parameter.opts}
    assert options - {"--help", "-h"} == SURFACE[name]
    arguments = [parameter.name for parameter in parameters if parameter.param_type_name == "argument"]
    assert arguments == ARGUMENTS.get(name, [])


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert clearhead.__version__ == metadata.version("clearhead")
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"clearhead {clearhead.__version__}\n"


def test_no_command_shows_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out = capfd.readouterr().out
    assert all(name.partition(" ")[0] in out for name in SURFACE)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "did you mean 'train'?"),
        (["translate", "r", "--bem-size", "3"], "did you mean '--beam-size'?"),
        (["translate"], "missing argument 'REF'"),
        (["translate", "r", "--beam-size", "many"], "--beam-size expects a whole number, got 'many'"),
        (["translate", "r", "--beam-size", "0"], "--beam-size must be a whole number of at least 1, got 0"),
        (["translate", "r", "--n-best", "6"], "--n-best is 6 but --beam-size is 5: raise --beam-size"),
        (
            ["translate", "r", "--beam-size", "1", "--length-penalty", "2"],
            "--length-penalty has no effect with --beam-size 1",
        ),
        (["average", "r"], "missing option '--last'"),
        (["average", "r", "--last", "2", "extra"], "unexpected extra argument"),
        (["train"], "missing argument"),
        (["translate", "no-such-run", __file__], "no-such-run: there is no such folder: "),
        (["translate", "runs/batch_size", __file__], "clearhead: runs/batch_size: there is no such folder: "),
        (["inspect", "force=True"], "clearhead: force=True: there is no such folder: "),
        (["inspect", "no-such-run"], "or a preset: transformer, "),
        (
            ["inspect", "gtp2"],
            "and no copy is cached: unset that, or name a run directory, a saved model or a checkpoint",
        ),
        (["inspect", "gtp2"], "or a preset (did you mean 'gpt2'?)"),
        (["inspect", "gpt2", "--addresses", "--length", "7"], "--length has no effect with --addresses"),
        (["new", "translat", "--source", "a", "--target", "b"], "did you mean 'translate'?"),
        (["new", "classify", "--source", "a"], "it needs --text and --labels"),
        (["new", "classify"], "missing option '--text'; it needs --text and --labels"),
        (["new", "classify", "--text", "a"], "missing option '--labels'; see"),
        (["new", "classify", "--texts", "a", "--labels", "b"], "(did you mean '--text'?); see"),
        (["new", "classify", "--text", "a", "--labels=b", "c"], "unexpected extra argument(s) (c); see"),
        (["new"], "missing command"),
        (["generate", "r", "--top", "3"], "no such option: --top"),
        (
            ["generate", "r", "--penalty-alpha", "0.6"],
            "no such option: --penalty-alpha: contrastive search is not supported; transformers also removed it",
        ),
        (["classify"], "missing argument 'REF'"),
        (["embed", "no-such-run", __file__], "no-such-run: there is no such folder: "),
        (["evaluate", "no-such-run", "--text", "t"], "no-such-run: there is no such folder: "),
    ],
)
def test_a_mistake_ends_in_one_sentence_and_exit_code_2(
    arguments: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert expected in captured.err and captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err


def test_debug_shows_where(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "no-such-run", "--debug"]) == 2
    assert "Traceback" in capfd.readouterr().err


def test_help_waits_for_no_library_of_training() -> None:
    program = (
        "import sys\nfrom clearhead.apps.cli.main import main\nmain(['--help'])\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert not loaded & {"torch", "transformers", "tokenizers", "matplotlib", "numpy", "pydantic"}


def test_a_model_is_loaded_without_a_library_of_pictures() -> None:
    program = "import sys\nimport clearhead.model.facade, clearhead.apps.cli.generate\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "torch" in loaded and not loaded & {"matplotlib", "transformers", "sklearn", "scipy"}
