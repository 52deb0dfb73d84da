"""Data and run files of the tasks beyond translation, so small that training takes a second."""

from __future__ import annotations

import json
from pathlib import Path

from tests.apps.cli.tiny_run import PAIRS, SIZES, train, write_pairs

SENTENCES = [source for source, _ in PAIRS]
LINES = [f"{sentence} {other}." for sentence, other in zip(SENTENCES, SENTENCES[7:] + SENTENCES[:7], strict=True)]
FAMILIES = {"generate": "decoder", "denoise": "encoder-decoder", "prefix": "encoder-decoder"}


def label_of(sentence: str) -> str:
    """Return the class that a tiny classifier learns: which half of the alphabet the first letter is in."""
    return "early" if sentence[0] in "ab" else "late"


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_labelled(folder: Path, name: str, sentences: list[str]) -> Path:
    """Write a table with the columns text, label, number and other."""
    rows = [f"{text}\t{label_of(text)}\t{ord(text[0]) - 96}.5\t{text[::-1]}" for text in sentences]
    return write_lines(folder / f"{name}.tsv", ["text\tlabel\tnumber\tother", *rows])


def write_tagged(folder: Path, name: str, sentences: list[str]) -> Path:
    """Write words with tags: the letters a and b are names, and one after the other is one name."""
    lines: list[str] = []
    for sentence in sentences:
        lines += [f"{word}\t{'B-NAME' if word in 'ab' else 'O'}" for word in sentence.split()] + [""]
    return write_lines(folder / f"{name}.conll", lines)


def write_sets(folder: Path, name: str, sentences: list[str]) -> Path:
    """Write texts with sets of labels: the letters a and m that they contain."""
    records = [{"text": text, "label": [letter for letter in "am" if letter in text]} for text in sentences]
    return write_lines(folder / f"{name}.jsonl", [json.dumps(record) for record in records])


def write_questions(folder: Path, name: str, sentences: list[str]) -> Path:
    """Write questions about the text after the first letter; sentences that begin with d or e have no answer."""
    questions = [
        (text[0], text, text[2:], 2) if text[0] in "abc" else (text[0], text, None, None) for text in sentences
    ]
    fields = ("question", "context", "answer", "start")
    return write_lines(
        folder / f"{name}.jsonl", [json.dumps(dict(zip(fields, question, strict=True))) for question in questions]
    )


def task_tables(folder: Path, kind: str) -> tuple[str, str]:
    """Write the data of one kind of run, and return its tables [task] and [data]."""
    train, valid = SENTENCES[::2] + SENTENCES[1::4], SENTENCES[3::4]
    if kind in ("generate", "fill", "denoise", "prefix"):
        text = write_lines(folder / "text.txt", LINES)
        held_out = write_lines(folder / "held-out.txt", LINES[::5])
        form = 'document = "line"'
        data = f'train = {{ text = "{text}", {form} }}\nvalid = {{ text = "{held_out}", {form} }}\n'
        return f'kind = "{"generate" if kind == "prefix" else kind}"', data
    if kind == "tag":
        tagged = [write_tagged(folder, name, split) for name, split in (("train", train), ("valid", valid))]
        return 'kind = "tag"', f'train = {{ text = "{tagged[0]}" }}\nvalid = {{ text = "{tagged[1]}" }}\n'
    if kind == "answer":
        question_files = [write_questions(folder, name, split) for name, split in (("train", train), ("valid", valid))]
        return (
            'kind = "answer"',
            f'train = {{ text = "{question_files[0]}" }}\nvalid = {{ text = "{question_files[1]}" }}\n',
        )
    if kind == "embed":
        for name, split in (("train", train), ("valid", valid)):
            write_pairs(folder, name, [(text, text[::-1]) for text in split])
        parts = (
            f'{{ source = "{folder}/{name}.source", target = "{folder}/{name}.target" }}' for name in ("train", "valid")
        )
        return 'kind = "embed"', "train = {}\nvalid = {}\n".format(*parts)
    columns = {"classify": "label", "pair": "label", "number": "number", "several": "label"}
    write = write_sets if kind == "several" else write_labelled
    files = [write(folder, name, split) for name, split in (("train", train), ("valid", valid))]
    rest = f'labels = "{columns[kind]}"' + (', pair = "other"' if kind == "pair" else "")
    labels = {"number": '\nlabels = "regression"', "several": '\nlabels = "multi_label"'}.get(kind, "")
    data = f'train = {{ text = "{files[0]}", {rest} }}\nvalid = {{ text = "{files[1]}", {rest} }}\n'
    return f'kind = "classify"{labels}', data


def write_task(folder: Path, kind: str) -> Path:
    """Write data and a small run file of one kind of run, and return the run file."""
    task, data = task_tables(folder, kind)
    tokenizer = "character" if kind in ("generate", "prefix") else "word"
    steps = "steps = 4\nvalidate_every = 2"
    if kind in ("classify", "tag", "answer"):
        steps = "steps = 60\nvalidate_every = 30\nlearning_rate = 1e-2"
    file = folder / "run.toml"
    file.write_text(
        f"""\
[task]
{task}
[data]
{data}max_length = 16
[tokenizer]
kind = "{tokenizer}"
{SIZES}family = "{FAMILIES.get(kind, "encoder")}"
[train]
run = "{folder}/run"
batch_tokens = 211
{steps}
warmup = 1
""",
        encoding="utf-8",
    )
    return file


def train_task(folder: Path, kind: str, *overrides: str) -> Path:
    """Train a tiny model of one kind, and return its run directory."""
    train(write_task(folder, kind), *overrides)
    return folder / "run"
