"""`clearhead new`: look at the data and write a run file whose sizes fit it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.console import Json, read_parallel, say, show, show_json, write_lines
from clearhead.cli.survey import BATCH_TOKENS, Pairs, Sizes, Survey, fitting_sizes, survey
from clearhead.errors import InputError, nearest

MOST_HELD_OUT = 1_000
LEAST_PAIRS = 20
PARTS = ("train", "valid")


@dataclass(frozen=True)
class TextFiles:
    """The files of one part of the data."""

    source: Path
    target: Path


@dataclass(frozen=True)
class Plan:
    """Which files a run file names.

    Attributes:
        train: for training.
        valid: for validation.
        every: every how many pairs one is held out of the user's files; 0: the user's files are used as they are.
    """

    train: TextFiles
    valid: TextFiles
    every: int

    def held_out(self, num_pairs: int) -> int:
        """Return how many pairs are held out."""
        return num_pairs // self.every if self.every else 0


def new(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to learn: translate.")],
    source: Annotated[
        Path, typer.Option("--source", help="Training text in the source language, one sentence in a line.")
    ],
    target: Annotated[Path, typer.Option("--target", help="Its translation, line by line.")],
    valid_source: Annotated[Path | None, typer.Option("--valid-source", help="Validation text, source side.")] = None,
    valid_target: Annotated[Path | None, typer.Option("--valid-target", help="Validation text, target side.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The run file to write.")] = Path("run.toml"),
    run: Annotated[str | None, typer.Option("--run", help="The run directory it will name.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run file with sizes that fit your text.

    \b
    Example:
      clearhead new translate --source train.de --target train.en
      clearhead new translate --source train.de --target train.en --valid-source val.de --valid-target val.en
      clearhead train run.toml

    It looks at the data and comments every choice. Without validation files, every k-th pair is held out of training:
    both parts are written into a folder beside the run file, and your files stay as they are. Nothing that exists is
    overwritten. By default the run directory is named after the endings of the two files, and training stops early once
    10 validations in a row have not improved BLEU. --json ends with {"file", "run", "pairs", "held_out"}.
    """
    _check_task(task)
    given = _given_validation(valid_source, valid_target)
    folder = output.with_name(f"{output.stem}-data")
    for path in (output,) if given is not None else (output, folder):
        if path.exists():
            raise InputError(f"{path} exists already and is not overwritten: move it, or name another with --output")
    pairs = list(zip(*read_parallel(source, target), strict=True))
    found = survey(pairs)
    if found.num_pairs < LEAST_PAIRS:
        raise InputError(
            f"{source} and {target} have {found.num_pairs} pairs with text on both sides; "
            f"training needs at least {LEAST_PAIRS}"
        )
    plan = (
        Plan(TextFiles(source, target), given, every=0) if given is not None else _split(pairs, folder, source, target)
    )
    run = run or _run_name(source, target)
    text = run_file_text(plan, found, run, held_out=plan.held_out(len(pairs)))
    _check(text, output)
    _write_all(output, text, plan, pairs)
    _report(found, plan, len(pairs))
    if as_json:
        held_out = plan.held_out(len(pairs))
        show_json({"file": str(output), "run": run, "pairs": found.num_pairs, "held_out": held_out})
    else:
        show(str(output))
        say(f"next: clearhead train {output}")


def _check_task(task: str) -> None:
    from clearhead.train.runfile_sections import TASK_KINDS

    if task not in TASK_KINDS:
        raise InputError(f"there is no task '{task}'{nearest(task, TASK_KINDS)}; the tasks are {', '.join(TASK_KINDS)}")
    if task != "translate":
        raise InputError(f"the task '{task}' is not available yet; this version trains 'translate'")


def _given_validation(source: Path | None, target: Path | None) -> TextFiles | None:
    """Return the user's validation files once they have been read, or None where there are none."""
    if source is None and target is None:
        return None
    if source is None or target is None:
        raise InputError("--valid-source and --valid-target belong together: give both, or neither")
    read_parallel(source, target)
    return TextFiles(source, target)


def _endings(source: Path, target: Path) -> tuple[str, str]:
    """Return the endings of two file names, which usually say the languages."""
    first, second = (path.name.removesuffix(".gz").rpartition(".")[2] for path in (source, target))
    return (first, second) if first != second else ("source", "target")


def _run_name(source: Path, target: Path) -> str:
    return "runs/" + "-".join(_endings(source, target))


def _split(pairs: Pairs, folder: Path, source: Path, target: Path) -> Plan:
    """Plan to hold pairs out; no more than are needed for a score that can be trusted."""
    train, valid = [TextFiles(*(folder / f"{part}.{end}" for end in _endings(source, target))) for part in PARTS]
    return Plan(train, valid, every=max(10, -(-len(pairs) // MOST_HELD_OUT)))


def _write_all(output: Path, text: str, plan: Plan, pairs: Pairs) -> None:
    """Write the run file last; when anything fails, nothing is left."""
    folder = plan.train.source.parent
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if plan.every:
            folder.mkdir()
            held = [index % plan.every == plan.every - 1 for index in range(len(pairs))]
            for files, is_valid in ((plan.train, False), (plan.valid, True)):
                chosen = [pair for pair, is_held in zip(pairs, held, strict=True) if is_held is is_valid]
                write_lines(files.source, [pair[0] for pair in chosen])
                write_lines(files.target, [pair[1] for pair in chosen])
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except (OSError, InputError) as error:
        if plan.every:
            shutil.rmtree(folder, ignore_errors=True)
        reason = f"{output} cannot be written: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise InputError(reason) from None


def _check(text: str, output: Path) -> None:
    """Never write a run file that `clearhead train` would refuse."""
    from clearhead.train.runfile import parse_run_file

    parse_run_file(text, str(output))


def _report(data: Survey, plan: Plan, num_pairs: int) -> None:
    unit = "characters" if data.kind == "character" else "words"
    longest = f"the longest side has {data.longest} {unit}"
    say(f"{data.num_pairs} pairs, {data.num_units} {unit}, {data.num_words} distinct words; {longest}")
    if data.num_empty:
        say(f"{data.num_empty} pairs have an empty side; training leaves them out")
    if plan.every:
        say(
            f"held out {plan.held_out(num_pairs)} pairs for validation, every {plan.every}th one; "
            f"training reads the copies in {plan.train.source.parent}"
        )


def run_file_text(plan: Plan, data: Survey, run: str, *, held_out: int) -> str:
    """Return a commented run file for translation."""
    sizes = fitting_sizes(data)
    unit = "characters" if data.kind == "character" else "words"
    how = f"   # {held_out} pairs held out of yours: every {plan.every}th" if held_out else ""
    longest = f"999 of 1000 pairs have at most {data.longest} {unit}"
    return f"""\
# Written by `clearhead new` for {data.num_pairs} pairs ({data.num_units} {unit}). Train with: clearhead train THIS_FILE
# Relative paths are relative to the folder in which you start the program.

[task]
kind = "translate"

[data]
train = {_table(plan.train)}
valid = {_table(plan.valid)}{how}
max_length = {sizes.max_length}   # in tokens; longer pairs are left out. {longest}

[tokenizer]
{_tokenizer_lines(data, sizes)}

[model]
family = "encoder-decoder"
preset = "transformer"   # the original Transformer; the lines below override it
layers = {sizes.layers}   # in the encoder, and as many in the decoder
width = {sizes.width}
heads = {sizes.heads}   # must divide the width
feedforward = {sizes.feedforward}
dropout = {sizes.dropout}   # more where there is little data

[train]
run = {json.dumps(run, ensure_ascii=False)}
epochs = {sizes.epochs}   # or steps, or seconds
batch_tokens = {BATCH_TOKENS}   # padded tokens in one batch: less if memory is short
optimizer = "adamw"   # adam | adamw | muon
learning_rate = 2e-3
schedule = "inverse-sqrt"   # paper | inverse-sqrt | cosine | linear | wsd | plateau | constant
warmup = {sizes.warmup}   # steps
label_smoothing = 0.1
clip = 1.0
seed = 1
validate_every = {sizes.validate_every}   # steps
keep = 3   # checkpoints, besides the best one
early_stop = {{ metric = "bleu", patience = {sizes.patience} }}   # validations in a row without a better score
"""


def _table(files: TextFiles) -> str:
    source, target = (json.dumps(str(path), ensure_ascii=False) for path in (files.source, files.target))
    return f"{{ source = {source}, target = {target} }}"


def _tokenizer_lines(data: Survey, sizes: Sizes) -> str:
    if data.kind == "split":
        lines = ['kind = "split"   # the text is segmented already: its "@@ " marks are joined in the output']
    elif data.kind == "character":
        lines = ['kind = "character"   # most lines are single words']
    else:
        lines = [
            'kind = "bpe"   # bpe | byte-bpe | unigram | wordpiece | word | character | byte | split',
            f"vocab_size = {sizes.vocab_size}   # there are {data.num_words} distinct words",
        ]
    return "\n".join([*lines, "joint = true   # one vocabulary for both languages, so that they can share one table"])
