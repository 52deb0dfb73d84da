"""Answers with control characters and line ends of every kind: a line for a line as text, and exact as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import clearhead
from clearhead.apps.cli.main import main
from clearhead.generate.options import GenerateOptions
from clearhead.generate.results import Generation, Hypothesis
from clearhead.tasks.answer.use import Answer
from clearhead.tasks.classify.use import Classification
from clearhead.tasks.fill.use import Filled
from clearhead.tasks.tag.use import Entity
from tests.laws.tiny import tiny

NASTY = "a\x1b]0;b\x07\n\r\v\f\x1c\x85\u2028\u2029\tc\x9b2Jd"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class Nasty:
    """A model whose every answer is the same text."""

    task = SimpleNamespace(is_paired=False)
    module = tiny("encoder/post/rotary")

    def tag(self, texts: Sequence[str], **_: Any) -> list[list[Entity]]:
        return [[Entity(NASTY, NASTY, 0, 1, 1.0), Entity("b", "b", 1, 2, 1.0)] for _ in texts]

    def fill(self, texts: Sequence[str], **_: Any) -> list[list[list[Filled]]]:
        return [[[Filled(NASTY, NASTY, 0.5, 0, 1, NASTY)]] for _ in texts]

    def classify(self, texts: Sequence[str], **_: Any) -> list[Classification]:
        return [Classification(NASTY, 0.5, {NASTY: 0.5}, (NASTY,)) for _ in texts]

    def translate_n_best(self, texts: Sequence[str], **_: Any) -> list[list[Hypothesis]]:
        return [[Hypothesis(NASTY, [NASTY], -1.0, -1.0)] for _ in texts]

    def answer(self, question: str, text: str, **_: Any) -> list[Answer]:
        return [Answer(NASTY, 0.5, 0, 1)]

    def generate_options(self, **_: Any) -> GenerateOptions:
        return GenerateOptions()

    def stream(self, prompt: str, **_: Any) -> Iterator[str]:
        yield from NASTY
        return Generation(NASTY, [NASTY], -1.0, "end", None)

    def generate(self, prompts: Sequence[str], **_: Any) -> list[list[Generation]]:
        return [[Generation(NASTY, [NASTY], -1.0, "end", None)] for _ in prompts]


COLUMNS = {
    "tag": 2,
    "fill": 2,
    "classify": 2,
    # A translation keeps its tab, for there are no other columns.
    "translate": 2,
    "translate --n-best 2 --beam-size 2": 2,
    "answer --question q --context c": 2,
}


@pytest.fixture(autouse=True)
def nasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearhead, "load", lambda *_, **__: Nasty(), raising=False)


def run(words: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    (folder / "input").write_text("one ___\ntwo ___\n", encoding="utf-8")
    places = {"answer": [], "generate": [], "fill": ["--file", f"{folder}/input"]}.get(words[0], [f"{folder}/input"])
    assert main([words[0], str(folder), *places, *words[1:]]) == 0, capfd.readouterr().err
    return capfd.readouterr().out


@pytest.mark.parametrize("command", COLUMNS)
def test_a_line_of_text_answers_a_line(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = run(command.split(), tmp_path, capfd)
    lines = out.splitlines()
    assert len(lines) == (1 if command.startswith("answer") else 2) and out.count("\n") == len(lines)
    assert {line.count("\t") + 1 for line in lines} == {COLUMNS[command]}
    assert not CONTROL.search(out) and r"a\x1b]0;b\x07" in out


@pytest.mark.parametrize("command", [*COLUMNS, "generate --greedy"])
def test_json_is_exact(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = run([*command.split(), "--json"], tmp_path, capfd)
    lines = out.splitlines()
    assert len(lines) == (1 if command.startswith(("answer", "generate")) else 2) and not CONTROL.search(out)
    for line in lines:
        assert NASTY in strings_of(json.loads(line))


@pytest.mark.parametrize("prompts", [["--prompt", "a"], ["--prompt", "a", "--prompt", "b"]], ids=["streamed", "whole"])
def test_generated_text_keeps_its_lines(prompts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = run(["generate", "--greedy", *prompts], tmp_path, capfd)
    assert out.splitlines()[:2] == [r"a\x1b]0;b\x07", " " * 7 + r"	c\x9b2Jd"]
    assert not CONTROL.search(out)


def strings_of(value: Any) -> set[str]:
    """Every text in a JSON value."""
    if isinstance(value, dict):
        return set().union(*map(strings_of, value.values()))
    if isinstance(value, list):
        return set().union(*map(strings_of, value))
    return {value} if isinstance(value, str) else set()
