"""Count lines of code without blank lines, comments and docstrings, on formatted code.

python -m tests.house.code_lines [FOLDER]
"""

from __future__ import annotations

import ast
import io
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


def main(folder: Path) -> None:
    """Print the code lines of each subpackage, and their sum."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        counts[parts[0] if len(parts) > 1 else "."] += code_lines(path.read_text("utf-8"))
    for package, count in counts.items():
        print(f"{package:12}{count:7,}")
    print(f"{'total':12}{sum(counts.values()):7,}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "clearhead"))
