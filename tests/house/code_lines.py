"""Count lines of Python, JavaScript and CSS without blank lines, comments and docstrings, on formatted code.

python -m tests.house.code_lines [FOLDER]
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Return the number of code lines of a Python file."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in LAYOUT]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def page_lines(text: str) -> int:
    """Return the number of code lines of a JavaScript or CSS file, whose comments begin at the start of a line."""
    code = re.sub(r"^\s*(/\*(?:(?!\*/).)*\*/|//[^\n]*)\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return sum(bool(line.strip()) for line in code.splitlines())


COUNTERS = {".py": code_lines, ".js": page_lines, ".css": page_lines}


def main(folder: Path) -> None:
    """Print the code lines of each subpackage and language, and the sum of each language."""
    counts: dict[str, Counter[str]] = {}
    for path in sorted(folder.rglob("*")):
        if count := COUNTERS.get(path.suffix):
            parts = path.relative_to(folder).parts
            row = counts.setdefault(parts[0] if len(parts) > 1 else ".", Counter())
            row[path.suffix] += count(path.read_text("utf-8"))
    total = sum(counts.values(), Counter[str]())
    print(f"{'':12}{'Python':>10}{'JavaScript':>12}{'CSS':>8}")
    for name, row in {**counts, "total": total}.items():
        print(f"{name:12}{row['.py']:10,}{row['.js']:12,}{row['.css']:8,}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "clearhead"))
