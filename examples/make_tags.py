"""Make data for a tagger: the role of every token in the installed Python standard library.

Usage: python examples/make_tags.py [FOLDER] [MEGABYTES]

The outputs are train.conll, valid.conll and test.conll, with one token and its tag per line. An empty line follows each
function, and outside of functions each statement. A tag is the role of a token, which its text alone does not decide.
A name, for example, can be a parameter, a local variable, a module, a method or a builtin. Dotted names, annotations
and decorators are entities of several tokens (B- and I-). Strings are written empty and comments as a single "#", so
that no token contains white space. The three data sets come from different files; MEGABYTES limits the training
sources.
"""

# ruff: noqa: D102 (visitor methods are named after their nodes)

from __future__ import annotations

import ast
import builtins
import io
import keyword
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from clearhead.apps.demo.common import library_sources

HELD_OUT = 0.1
PUNCTUATION = frozenset("()[]{},:;") | {"->", "..."}
IGNORED = frozenset(
    {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
)
BUILTINS = frozenset(dir(builtins))
# Since Python 3.12 an f-string is several tokens; in earlier versions it is one token.
FSTRING_START = getattr(tokenize, "FSTRING_START", None)
FSTRING_END = getattr(tokenize, "FSTRING_END", None)

_FROM = re.compile(r"from\s+[.\s]*(?!import\b)(\w[\w.]*)\s")

Place = tuple[int, int]
Line = tuple[str, str]


class Roles(ast.NodeVisitor):
    """Visitor that collects the roles of the names in a module, by their position.

    Args:
        source: the text of the module.

    Attributes:
        roles: the role of the name at a position (line from 1, column in characters from 0).
        spans: the entities of several tokens, as start, end (exclusive) and type.
        docstrings: the positions at which docstrings start.
        functions: the first and last lines of the outermost functions.
    """

    def __init__(self, source: str) -> None:
        self._lines = source.splitlines(keepends=True)
        self.roles: dict[Place, str] = {}
        self.spans: list[tuple[Place, Place, str]] = []
        self.docstrings: set[Place] = set()
        self.functions: list[tuple[int, int]] = []
        self._parameters: list[set[str]] = []
        self._locals: list[set[str]] = []
        tree = ast.parse(source)
        imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        self._modules = {alias.asname or alias.name.split(".")[0] for alias in imports}
        self.visit(tree)

    def _place(self, line: int, num_bytes: int) -> Place:
        """Return a position with the byte offset of `ast` converted to characters."""
        return line, len(self._lines[line - 1].encode()[:num_bytes].decode())

    def _start(self, node: ast.AST) -> Place:
        return self._place(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> Place:
        return self._place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _span(self, node: ast.AST, kind: str) -> None:
        self.spans.append((self._start(node), self._end(node), kind))

    def _note_docstring(self, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            self.docstrings.add(self._start(first))

    def visit_Module(self, node: ast.Module) -> None:
        self._note_docstring(node)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._note_docstring(node)
        for decorator in node.decorator_list:
            self._decorate(decorator)
        for base in node.bases:
            if isinstance(base, ast.Name | ast.Attribute):
                self._span(base, "base")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._note_docstring(node)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if not self._parameters:
            self.functions.append((first, node.end_lineno or node.lineno))
        for decorator in node.decorator_list:
            self._decorate(decorator)
        if node.returns is not None:
            self._span(node.returns, "annotation")
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and not _is_read(inner)}
        caught = {inner.name for inner in ast.walk(node) if isinstance(inner, ast.ExceptHandler) and inner.name}
        self._inside(node, names | caught)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inside(node, set())

    def _inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, names: set[str]) -> None:
        every = node.args
        arguments = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
        self._parameters.append({argument.arg for argument in arguments if argument is not None})
        self._locals.append(names)
        self.generic_visit(node)
        self._parameters.pop()
        self._locals.pop()

    def _decorate(self, decorator: ast.expr) -> None:
        self._span(decorator.func if isinstance(decorator, ast.Call) else decorator, "decorator")

    def visit_arg(self, node: ast.arg) -> None:
        self.roles[self._start(node)] = "parameter"
        if node.annotation is not None:
            self._span(node.annotation, "annotation")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._span(node.annotation, "annotation")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg is not None:
            self.roles[self._start(node)] = "argument"
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self._name_attribute(node.func, "method")
        elif isinstance(node.func, ast.Name) and self._role_of(node.func.id) == "global":
            self.roles[self._start(node.func)] = "call"
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._name_attribute(node, "attribute")
        self.generic_visit(node)

    def _name_attribute(self, node: ast.Attribute, role: str) -> None:
        line, column = self._end(node)
        self.roles.setdefault((line, column - len(node.attr)), role)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            line, column = self._start(alias)
            self.spans.append(((line, column), (line, column + len(alias.name)), "module"))
            self._name_alias(alias, "module")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        line, column = self._start(node)
        if match := _FROM.match(self._lines[line - 1], column):
            self.spans.append(((line, match.start(1)), (line, match.end(1)), "module"))
        for alias in node.names:
            self.roles[self._start(alias)] = "imported"
            self._name_alias(alias, "imported")

    def _name_alias(self, alias: ast.alias, role: str) -> None:
        if alias.asname is not None:
            line, column = self._end(alias)
            self.roles[line, column - len(alias.asname)] = role

    def visit_Name(self, node: ast.Name) -> None:
        self.roles.setdefault(self._start(node), self._role_of(node.id))

    def _role_of(self, name: str) -> str:
        for parameters, local in zip(reversed(self._parameters), reversed(self._locals), strict=True):
            if name in parameters:
                return "parameter"
            if name in local:
                return "variable"
        if name in self._modules:
            return "module"
        return "builtin" if name in BUILTINS else "global"


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def tagged_sentences(source: str) -> Iterator[list[Line]]:
    """Yield the functions and other statements of a module as tokens with their tags.

    Args:
        source: the text of the module.

    Raises:
        SyntaxError, tokenize.TokenError: the text is not a module of this version of Python.
    """
    roles = Roles(source)
    sentence: list[Line] = []
    owner: tuple[int, int] | None = None
    before = ""
    for position, text, kind, ends in _tokens(source):
        now = next((function for function in roles.functions if function[0] <= position[0] <= function[1]), None)
        if sentence and now != owner:
            yield sentence
            sentence = []
        owner = now
        if text:
            sentence.append((text, _tag(roles, position, text, kind, before)))
            before = text
        if ends and owner is None and any(word != "#" for word, _ in sentence):
            yield sentence
            sentence = []
    if sentence:
        yield sentence


def _tokens(source: str) -> Iterator[tuple[Place, str, int, bool]]:
    """Yield position, text and type of each token, and True if a statement ends there; empty text is no token."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if FSTRING_START is not None and token.type in (FSTRING_START, FSTRING_END):
            depth += 1 if token.type == FSTRING_START else -1
            if depth == 1 and token.type == FSTRING_START:
                yield token.start, _empty_string(token.string), tokenize.STRING, False
        elif depth:
            continue
        elif token.type in IGNORED:
            yield token.start, "", token.type, token.type == tokenize.NEWLINE
        elif token.type == tokenize.STRING:
            yield token.start, _empty_string(token.string), token.type, False
        else:
            yield token.start, "#" if token.type == tokenize.COMMENT else token.string, token.type, False


def _empty_string(text: str) -> str:
    prefix = text[: min(position for position in (text.find("'"), text.find('"')) if position >= 0)]
    return f'{prefix.lower()}""'


def _tag(roles: Roles, position: Place, text: str, kind: int, before: str) -> str:
    for start, end, entity in roles.spans:
        if start <= position < end:
            return f"{'B' if position == start else 'I'}-{entity}"
    return f"B-{_role(roles, position, text, kind, before)}"


def _role(roles: Roles, position: Place, text: str, kind: int, before: str) -> str:
    if kind == tokenize.STRING:
        return "docstring" if position in roles.docstrings else "string"
    if kind in (tokenize.NUMBER, tokenize.COMMENT):
        return tokenize.tok_name[kind].lower()
    if kind == tokenize.OP:
        return "punctuation" if text in PUNCTUATION else "operator"
    if text in ("True", "False", "None"):
        return "constant"
    if keyword.iskeyword(text):
        return "keyword"
    if before in ("def", "class"):
        return "function" if before == "def" else "class"
    if position in roles.roles:
        return roles.roles[position]
    return "keyword" if keyword.issoftkeyword(text) and text != "_" else "variable"


def make_tags(folder: Path, max_bytes: int) -> None:
    """Write train.conll, valid.conll and test.conll.

    Args:
        folder: the output folder; it is created.
        max_bytes: the size limit of the training sources.
    """
    sources = library_sources(max_bytes=max_bytes, max_valid_bytes=max_bytes // 4, valid_share=HELD_OUT)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": sources.train, "valid": sources.valid[::2], "test": sources.valid[1::2]}
    for name, files in parts.items():
        num_files = num_sentences = num_tokens = 0
        with (folder / f"{name}.conll").open("w", encoding="utf-8", newline="\n") as output:
            for file in files:
                try:
                    with warnings.catch_warnings(action="ignore"):  # of invalid escapes in old sources
                        sentences = list(tagged_sentences(file.text))
                except (SyntaxError, tokenize.TokenError, ValueError) as error:
                    print(f"{file.name} is skipped: {error}")
                    continue
                for sentence in sentences:
                    output.write("".join(f"{token}\t{tag}\n" for token, tag in sentence) + "\n")
                num_files += 1
                num_sentences += len(sentences)
                num_tokens += sum(map(len, sentences))
        print(f"{name}.conll: {num_files:,} files, {num_sentences:,} sentences, {num_tokens:,} tokens")


if __name__ == "__main__":
    if len(sys.argv) > 3 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    megabytes = float(sys.argv[2]) if len(sys.argv) == 3 else 4.0
    make_tags(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/data/tags"), int(1e6 * megabytes))
