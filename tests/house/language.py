"""Prose of the repository, split into sentences, and the rules of plain English that a program can check."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from tests.house.source import Source

NAMES = frozenset("found part place one own given said kept made asked told way thing".split())
"""Words that name nothing: no variable, parameter, attribute, function or class is called so."""
IRREGULAR = frozenset(
    "begun bound broken brought built chosen drawn fed found frozen given gone grown held hidden kept known laid led "
    "left lost made met said seen sent shown spent spoken taken taught thrown told torn won written".split()
)
NO_PARTICIPLES = frozenset("embed exceed feed need proceed seed speed".split())
MOST_WORDS = 25
PHRASES = (
    "so many", "(?:is|are|was|were) told", "(?:is|are|was|were) said", "of (?:its|their|his|her|your|our) own",
    "user's own", "nobody", "beside", "behind", "as of", "whose [^.,;:]{1,40} (?:is|are) of", "as (?:it is|they are)",
    "that many", "bit by bit",
)  # fmt: skip
PHRASE = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b", re.IGNORECASE)
START = re.compile(r"(?:What|How|Which|Where|Why|Who|Whose|Whom|When|Whether|Of|That|For|As|By|In)\b", re.IGNORECASE)
"""Words with which no docstring and no entry of an argument begins; an entry may begin with "whether"."""
HEADER = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Legend|Shapes|Shape suffixes|Examples?):$")
ENTRY = re.compile(r"((?:\*{0,2}\w+(?:, (?=\*{0,2}\w)| and )?)+):\s+(.*)")
ITEM = re.compile(r"^(?:[-*+] |\d+[.)] )")
END = re.compile(r"""(?<=[.!?])["')\]*_]*\s+(?=["'(\[*_`]*[A-Z0-9<])|(?<=[.!?])\s+(?=`)""")
CODE = re.compile(r"``.+?``|`[^`]+`|\$[^$]+\$|</?[a-z][^<>]*>|\{[^{}]*\}")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
PRAGMA = re.compile(r"#\s*(?:type:|noqa|fmt:|pragma|!|%%|---|pyright|mypy|ruff)")


@dataclass(frozen=True)
class Passage:
    """A paragraph, list item, table cell, comment or message.

    Args:
        path: the file, from the root of the repository.
        line: the line of the file on which the passage, or the docstring that contains it, begins.
        kind: "docstring" (its first paragraph), "entry" of an argument, "text", "comment" or "message".
        text: the passage on a single line.
    """

    path: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.text}"

    def sentences(self) -> list[str]:
        """Return the sentences of the passage."""
        return END.split(self.text)


def count_words(sentence: str) -> int:
    """Return the number of words; code, formulas and the target of a link count as one word."""
    plain = CODE.sub("code", LINK.sub(r"\1", sentence))
    return sum(any(char.isalpha() for char in word) for word in plain.split())


def read_docstrings(source: Source) -> Iterator[Passage]:
    """Yield the passages of each docstring, those under variables and fields included."""
    for node in ast.walk(source.tree):
        body = getattr(node, "body", [])
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from split_docstring(source.path, statement.lineno, inspect.cleandoc(value.value))


def split_docstring(path: str, line: int, text: str) -> Iterator[Passage]:
    """Yield the passages of one docstring without its examples of code."""
    lines: list[str] = []
    kind, section = "docstring", ""
    for raw in [*text.split("\n"), ""]:
        content, indent = raw.strip(), len(raw) - len(raw.lstrip())
        header = HEADER.match(raw)
        if lines and (not content or header or ITEM.match(content) or (section and indent <= 4)):
            yield Passage(path, line, kind, " ".join(lines))
            lines, kind = [], "text"
        if header:
            section = header[1]
        elif not content or (indent == 0 and section):
            section = "" if indent == 0 and content else section
            lines = [content] if content else []
        elif section in {"Args", "Attributes"} and indent == 4 and (entry := ENTRY.match(content)):
            lines, kind = [entry[2]], "entry"
        elif section not in {"Example", "Examples"} and (section or indent < 4):
            lines.append(ITEM.sub("", content, count=1))


def read_comments(source: Source) -> Iterator[Passage]:
    """Yield each comment; lines of comments that follow each other are one passage."""
    lines: list[str] = []
    start = last = 0
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(source.text).readline) if token.type == tokenize.COMMENT
    ]
    for token in tokens:
        if PRAGMA.match(token.string):
            continue
        alone = not token.line[: token.start[1]].strip()
        if lines and not (alone and token.start[0] == last + 1):
            yield Passage(source.path, start, "comment", " ".join(lines))
            lines = []
        start = start if lines else token.start[0]
        last = token.start[0]
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield Passage(source.path, start, "comment", " ".join(lines))


def read_messages(source: Source) -> Iterator[Passage]:
    """Yield each string of several words that is no docstring: messages, help and labels; {} stands for a value."""
    skipped = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(piece) for piece in ast.walk(node) if piece is not node}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
            skipped.add(id(node.func.value))  # a list of words
    for node in ast.walk(source.tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "{}" for piece in node.values)
        else:
            continue
        if text.count(" ") >= 2 and "\n" not in text.strip() and not re.search(r"[<>=;\\]|\(\?", text):
            yield Passage(source.path, node.lineno, "message", text.strip())


def read_document(path: str, text: str) -> Iterator[Passage]:
    """Yield the passages of a page: paragraphs, list items, headings, and table cells split at semicolons."""
    lines: list[str] = []
    start, fence = 0, ""
    for number, raw in enumerate([*text.split("\n"), ""], 1):
        content = raw.strip()
        if mark := re.match(r"(`{3,}|~{3,}|:{3,})", content):
            fence = "" if fence and content.startswith(fence) else fence or (mark[1] if mark[1][0] != ":" else "")
            content = ""
        elif fence:
            content = ""
        row = content.startswith("|")
        if lines and (not content or row or ITEM.match(content) or content.startswith(("#", ">"))):
            yield Passage(path, start, "text", " ".join(lines))
            lines = []
        if row:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", content.strip("|"))]
            yield from (
                Passage(path, number, "text", item) for cell in cells for item in cell.split("; ") if item.strip("-: ")
            )
        elif content and not content.startswith(("<!--", "![", ":", "(")):
            start = start if lines else number
            lines.append(ITEM.sub("", content.lstrip("#> "), count=1))
            if content.startswith("#"):
                yield Passage(path, number, "text", lines.pop())


def has_bad_start(passage: Passage) -> bool:
    """Return whether a docstring or the entry of an argument begins with a word of `START`."""
    if passage.kind not in {"docstring", "entry"} or (passage.kind == "entry" and passage.text.startswith("whether ")):
        return False
    return START.match(passage.text) is not None


def find_long_sentences(passage: Passage) -> list[str]:
    """Return the sentences of more than `MOST_WORDS` words."""
    return [sentence for sentence in passage.sentences() if count_words(sentence) > MOST_WORDS]


def find_phrases(passage: Passage) -> list[str]:
    """Return the phrases of the passage that readers stumble over."""
    return [match[0] for match in PHRASE.finditer(CODE.sub("code", LINK.sub(r"\1", passage.text)))]


def find_bound_names(tree: ast.Module, names: frozenset[str] = NAMES) -> Iterator[tuple[str, int]]:
    """Yield the name and line of each variable, parameter, attribute, function, class and import in `names`."""
    for node in ast.walk(tree):
        bound: list[str | None] = []
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound = [node.id]
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            bound = [node.attr]
        elif isinstance(node, ast.arg):
            bound = [node.arg]
        elif isinstance(node, ast.alias):
            bound = [node.asname or node.name]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.MatchAs | ast.MatchStar):
            bound = [node.name]
        elif isinstance(node, ast.MatchMapping):
            bound = [node.rest]
        yield from ((name, getattr(node, "lineno", 0)) for name in bound if name in names)


def is_participle(name: str) -> bool:
    """Return whether the first word of a function's name is a past participle, as in `checked_limits`."""
    word = name.strip("_").split("_")[0]
    return word in IRREGULAR or (word.endswith("ed") and len(word) > 3 and word not in NO_PARTICIPLES)


def find_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> tuple[list[str], list[str]]:
    """Return the names under "Args:" in a docstring, and the parameters of the function or class.

    Private parameters are left out of both.
    """
    in_args, documented = False, list[str]()
    for raw in (ast.get_docstring(node) or "").split("\n"):
        indent = len(raw) - len(raw.lstrip())
        if indent == 0:
            in_args = raw.strip() == "Args:"
        elif in_args and indent == 4 and (entry := ENTRY.match(raw.strip())):
            documented += [name.strip("* ") for name in re.split(r", | and ", entry[1])]
    function: ast.AST | None = node
    if isinstance(node, ast.ClassDef):
        function = next((item for item in node.body if getattr(item, "name", "") == "__init__"), None)
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = function.args
        listed = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
        names = [argument.arg for argument in listed if argument and argument.arg not in {"self", "cls"}]
    else:
        fields = (item for item in getattr(node, "body", []) if isinstance(item, ast.AnnAssign))
        names = [
            item.target.id
            for item in fields
            if isinstance(item.target, ast.Name) and not ast.unparse(item.annotation).startswith("ClassVar")
        ]
    return documented, [name for name in names if not name.startswith("_") or name in documented]
