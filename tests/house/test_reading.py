"""Files of a model or a run are opened in one place; everywhere else that is the exception, and listed here."""

from __future__ import annotations

import ast
from collections import Counter

from tests.house.source import Source, package_sources

FOLDERS = ("runs", "hf", "text", "weights", "model", "task.py")
CALLS = {"open", "os.open", "json.loads", "json.load", "np.load", "safe_open", "load_file", "tomllib.load"}
METHODS = {"open", "read_text", "read_bytes"}
ALLOWED = {
    # What the libraries wrote a moment ago, and what a process of ours answers.
    "clearhead/text/tokenizer_files.py": {"json.loads": 1},
    "clearhead/text/byte_level_files.py": {"json.loads": 1},
    "clearhead/text/tokenizer_training.py": {"json.loads": 2},
    "clearhead/text/template_worker.py": {"json.loads": 1, "open": 1},
    "clearhead/text/chat.py": {"json.loads": 1},
    # The libraries of tensors map files that were checked just before.
    "clearhead/weights/files.py": {"safe_open": 2},
    "clearhead/hf/files/tensor_files.py": {"safe_open": 1, ".open": 2},
    # Appended to; and who holds a lock, for a message.
    "clearhead/runs/metrics.py": {".open": 1},
    "clearhead/runs/directory.py": {".read_text": 1},
}


def readings(source: Source) -> Counter[str]:
    """Every call that opens or parses a file by itself."""
    found: Counter[str] = Counter()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS:
                found[called] += 1
            elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                found[f".{node.func.attr}"] += 1
    return found


def test_files_of_models_and_runs_have_one_reader() -> None:
    sources = [one for one in package_sources() if one.path.split("/")[1] in FOLDERS]
    found = {one.path: dict(readings(one)) for one in sources if readings(one)}
    assert found == ALLOWED


def test_the_rule_can_fail() -> None:
    text = "open(p); json.loads(t); path.read_text(); path.open('rb'); safe_open(p)"
    assert len(readings(Source.of(text))) == 5
