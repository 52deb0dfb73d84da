"""Make data for question answering: questions about functions of the installed Python standard library.

Usage: python examples/make_questions.py [FOLDER] [MEGABYTES]

The outputs are train.jsonl, valid.jsonl and test.jsonl. A context is a few neighbouring functions of one file, each
with its parameters, the first sentence of its docstring and its return value. Questions ask for the purpose, the return
value, the first or last parameter, or a default of a function, or for the function that has a given parameter. The
answer is in the context. Training, validation and test data come from different files; MEGABYTES limits the training
sources.
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
# Limits of a context: number of functions, and number of characters.
LEAST_FUNCTIONS, MOST_FUNCTIONS, MOST_CHARACTERS = 2, 5, 500
# Maximum length of a docstring sentence or a return value, in characters.
LONGEST = 80
QUESTIONS = 4
_SENTENCE = re.compile(r"[^.]*\w(?=\.( |$)|$)")
_WORD = re.compile(r"\w")

Span = tuple[int, int]


@dataclass(frozen=True)
class Outline:
    """Outline of a function: the text that a context shows, and the spans of possible answers in it.

    Attributes:
        name: the name of the function.
        text: the text of the function in a context.
        parameters: the span of each parameter's name in the text, without self and cls.
        defaults: the span of each default, by the name of its parameter.
        doc, returned: the spans of the docstring sentence and of the return value; None if there is none.
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
    sentence = _SENTENCE.match(" ".join(paragraph.split()))
    if sentence is not None and len(sentence[0]) <= LONGEST:
        text += '\n    """'
        doc = (len(text), len(text) + len(sentence[0]))
        text += f'{sentence[0]}."""'
    values = [node.value for node in function.body if isinstance(node, ast.Return) and node.value is not None]
    shown = ast.unparse(values[-1]) if values else ""
    if 0 < len(shown) <= LONGEST and "\n" not in shown:
        text += "\n    return "
        returned = (len(text), len(text) + len(shown))
        text += shown
    return Outline(function.name, text, parameters, defaults, doc, returned)


def _arguments(every: ast.arguments) -> Iterator[tuple[str, ast.arg | None, ast.expr | None]]:
    """Yield the prefix (such as "*"), the name and the default of each parameter, in the order of the source."""
    placed = [*every.posonlyargs, *every.args]
    padded_defaults = [None] * (len(placed) - len(every.defaults)) + [*every.defaults]
    for index, (argument, default) in enumerate(zip(placed, padded_defaults, strict=True)):
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
    """Yield groups of neighbouring functions with different names; each group fits into a context.

    Args:
        source: the text of the module.

    Raises:
        SyntaxError, ValueError: the text is not a module of this version of Python.
    """
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    group: list[Outline] = []
    for node in sorted(nodes, key=lambda node: node.lineno):
        function = outline(node)
        size = sum(len(other.text) + 1 for other in group) + len(function.text)
        is_new = all(function.name != other.name for other in group)
        if group and (size > MOST_CHARACTERS or len(group) == MOST_FUNCTIONS or not is_new):
            if len(group) >= LEAST_FUNCTIONS:
                yield group
            group = []
        if len(function.text) <= MOST_CHARACTERS // 2:
            group.append(function)
    if len(group) >= LEAST_FUNCTIONS:
        yield group


def questions(group: Sequence[Outline]) -> Iterator[tuple[str, str, int]]:
    """Yield all questions about a context, each with its answer and the index of the answer's first character."""
    begin = 0
    for function in group:
        spans = list(function.parameters.values())
        candidates: list[tuple[str, Span | None]] = [
            (f"What does {function.name} do?", function.doc),
            (f"What does {function.name} return?", function.returned),
            *((f"What is the default of {name} in {function.name}?", span) for name, span in function.defaults.items()),
        ]
        if len(spans) > 1:
            candidates += [(f"What is the {ordinal} parameter of {function.name}?", spans[index])
                           for ordinal, index in (("first", 0), ("last", -1))]  # fmt: skip
        for name in function.parameters:
            if sum(name in other.parameters for other in group) == 1:
                candidates.append((f"Which function has the parameter {name}?", (4, 4 + len(function.name))))
        for question, span in candidates:
            if span is not None and _WORD.search(answer := function.text[slice(*span)]):
                yield question, answer, begin + span[0]
        begin += len(function.text) + 1


def records(file: SourceFile) -> Iterator[dict[str, object]]:
    """Yield a sample of questions about each context of a file, as JSON records."""
    for group in contexts(file.text):
        context = "\n".join(function.text for function in group)
        candidates = list(questions(group))
        # The context seeds the draw, so that the questions of a file do not depend on other files.
        for question, answer, start in random.Random(context).sample(candidates, min(QUESTIONS, len(candidates))):
            yield {"context": context, "question": question, "answer": answer, "start": start}


def make_questions(folder: Path, max_bytes: int) -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl.

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
                    with warnings.catch_warnings(action="ignore"):  # warnings about invalid escapes in old sources
                        questions_of_file = list(records(file))
                except (SyntaxError, ValueError) as error:
                    print(f"{file.name} is skipped: {error}")
                    continue
                output.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in questions_of_file))
                num_files += 1
                num_questions += len(questions_of_file)
        print(f"{name}.jsonl: {num_files:,} files, {num_questions:,} questions")


if __name__ == "__main__":
    if len(sys.argv) > 3 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    megabytes = float(sys.argv[2]) if len(sys.argv) == 3 else 20.0
    make_questions(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/data/questions"), int(1e6 * megabytes))
