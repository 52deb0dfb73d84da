"""Make data for a model that answers questions: about the functions of the installed Python standard library.

Usage: python examples/make_questions.py [FOLDER] [MEGABYTES]

The outputs are train.jsonl, valid.jsonl and test.jsonl. A context is a few neighbouring functions of one file, each
with its parameters, the first sentence of its docstring and what it returns. A question asks what a function does or
returns, for the first or the last of its parameters, for a default, or which function has a parameter; its answer
stands in the context. The parts come from different files; MEGABYTES limits the training sources.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clearhead.apps.demo.common import SourceFile, library_sources

HELD_OUT = 0.2
# Of a context, in functions and in characters.
LEAST_FUNCTIONS, MOST_FUNCTIONS, MOST_CHARACTERS = 2, 5, 500
# Of a docstring's sentence and of what is returned, in characters.
LONGEST = 80
QUESTIONS = 4
_SENTENCE = re.compile(r"[^.]*\w(?=\.( |$)|$)")
_WORD = re.compile(r"\w")

Span = tuple[int, int]


@dataclass(frozen=True)
class Outline:
    """The outline of a function.

    Attributes:
        name: of the function.
        text: what a context shows of it.
        parameters: the place of each parameter's name in this text, without self and cls.
        defaults: the place of each default, by the name of its parameter.
        doc, returned: the places of what it does and of what it returns, where it says so.
    """

    name: str
    text: str
    parameters: dict[str, Span]
    defaults: dict[str, Span]
    doc: Span | None
    returned: Span | None


def outline(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Outline:
    """Return the outline of a function."""
    text = f"def {function.name}("
    parameters, defaults = dict[str, Span](), dict[str, Span]()
    for mark, argument, default in _arguments(function.args):
        text += (", " if not text.endswith("(") else "") + mark
        if argument is None:
            continue
        if argument.arg not in ("self", "cls"):
            parameters[argument.arg] = (len(text), len(text) + len(argument.arg))
        text += argument.arg
        if default is not None:
            shown = ast.unparse(default)
            text += "="
            defaults[argument.arg] = (len(text), len(text) + len(shown))
            text += shown
    text += "):"
    doc, returned = None, None
    paragraph = (ast.get_docstring(function) or "").strip().split("\n\n")[0]
    found = _SENTENCE.match(" ".join(paragraph.split()))
    if found is not None and len(found[0]) <= LONGEST:
        text += '\n    """'
        doc = (len(text), len(text) + len(found[0]))
        text += f'{found[0]}."""'
    values = [node.value for node in function.body if isinstance(node, ast.Return) and node.value is not None]
    shown = ast.unparse(values[-1]) if values else ""
    if 0 < len(shown) <= LONGEST and "\n" not in shown:
        text += "\n    return "
        returned = (len(text), len(text) + len(shown))
        text += shown
    return Outline(function.name, text, parameters, defaults, doc, returned)


def _arguments(every: ast.arguments) -> Iterator[tuple[str, ast.arg | None, ast.expr | None]]:
    """Yield the marks, the names and the defaults of a function's parameters, as they are written."""
    placed = [*every.posonlyargs, *every.args]
    behind = [None] * (len(placed) - len(every.defaults)) + [*every.defaults]
    for index, (argument, default) in enumerate(zip(placed, behind, strict=True)):
        yield "", argument, default
        if index + 1 == len(every.posonlyargs):
            yield "/", None, None
    if every.vararg is not None or every.kwonlyargs:
        yield "*", every.vararg, None
    for argument, default in zip(every.kwonlyargs, every.kw_defaults, strict=True):
        yield "", argument, default
    if every.kwarg is not None:
        yield "**", every.kwarg, None


def contexts(source: str) -> Iterator[list[Outline]]:
    """Yield neighbouring functions of a module, of different names, as much as a context holds.

    Args:
        source: the text of the module.

    Raises:
        SyntaxError, ValueError: it is not a module of this version of Python.
    """
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    group: list[Outline] = []
    for node in sorted(nodes, key=lambda node: node.lineno):
        found = outline(node)
        size = sum(len(other.text) + 1 for other in group) + len(found.text)
        is_new = all(found.name != other.name for other in group)
        if group and (size > MOST_CHARACTERS or len(group) == MOST_FUNCTIONS or not is_new):
            if len(group) >= LEAST_FUNCTIONS:
                yield group
            group = []
        if len(found.text) <= MOST_CHARACTERS // 2:
            group.append(found)
    if len(group) >= LEAST_FUNCTIONS:
        yield group


def questions(group: Sequence[Outline]) -> Iterator[tuple[str, str, int]]:
    """Yield all questions about a context, each with its answer and the character where that begins."""
    begin = 0
    for one in group:
        places = list(one.parameters.values())
        asked: list[tuple[str, Span | None]] = [
            (f"What does {one.name} do?", one.doc),
            (f"What does {one.name} return?", one.returned),
            *((f"What is the default of {name} in {one.name}?", place) for name, place in one.defaults.items()),
        ]
        if len(places) > 1:
            asked += [(f"What is the {which} parameter of {one.name}?", places[index])
                      for which, index in (("first", 0), ("last", -1))]  # fmt: skip
        for name in one.parameters:
            if sum(name in other.parameters for other in group) == 1:
                asked.append((f"Which function has the parameter {name}?", (4, 4 + len(one.name))))
        for question, place in asked:
            if place is not None and _WORD.search(answer := one.text[slice(*place)]):
                yield question, answer, begin + place[0]
        begin += len(one.text) + 1


def records(file: SourceFile) -> Iterator[dict[str, object]]:
    """Yield some questions about each context of a file."""
    for group in contexts(file.text):
        context = "\n".join(one.text for one in group)
        found = list(questions(group))
        # The context decides the draw: a file has the same questions whichever others there are.
        for question, answer, start in random.Random(context).sample(found, min(QUESTIONS, len(found))):
            yield {"context": context, "question": question, "answer": answer, "start": start}


def make_questions(folder: Path, max_bytes: int) -> None:
    """Write all files.

    Args:
        folder: the output folder; it is created.
        max_bytes: the size limit of the training sources.
    """
    sources = library_sources(max_bytes=max_bytes, max_valid_bytes=max_bytes // 4, valid_share=HELD_OUT)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": sources.train, "valid": sources.valid[::2], "test": sources.valid[1::2]}
    for name, files in parts.items():
        num_files = num_questions = 0
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8", newline="\n") as output:
            for file in files:
                try:
                    with warnings.catch_warnings(action="ignore"):  # of invalid escapes in old sources
                        found = list(records(file))
                except (SyntaxError, ValueError) as error:
                    print(f"{file.name} is skipped: {error}")
                    continue
                output.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in found))
                num_files += 1
                num_questions += len(found)
        print(f"{name}.jsonl: {num_files:,} files, {num_questions:,} questions")


if __name__ == "__main__":
    if len(sys.argv) > 3 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    megabytes = float(sys.argv[2]) if len(sys.argv) == 3 else 20.0
    make_questions(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/data/questions"), int(1e6 * megabytes))
