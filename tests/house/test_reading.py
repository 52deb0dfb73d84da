"""Files of models and runs are opened in one place; everything else that opens or parses a file is listed here."""

from __future__ import annotations

import ast
from collections import Counter

from tests.house.source import Source, package_sources

READER = "clearhead/base/files.py"
# Files that the user names as data, which may be pipes, and those of Python's own library.
DATA = ("clearhead/data/sources/", "clearhead/apps/demo/")
CALLS = {
    "open", "os.open", "gzip.open", "json.loads", "json.load", "np.load", "np.memmap", "safe_open", "load_file",
    "torch.load", "tomllib.load", "tomllib.loads", "read_text_file",
}  # fmt: skip
METHODS = {"open", "read_text", "read_bytes"}
ALLOWED = {
    # What the libraries wrote a moment ago, and what a process of ours answers.
    "clearhead/text/tokenizer_files.py": {"json.loads": 2},
    "clearhead/text/tokenizer_training.py": {"json.loads": 3},
    "clearhead/base/child_loop.py": {"json.loads": 1, "open": 1},
    "clearhead/base/child_process.py": {"json.loads": 1},
    "clearhead/apps/check/handwritten/child.py": {"json.loads": 2, ".read_text": 1},
    # Bodies of requests, to be typed.
    "clearhead/apps/serve/api/bodies.py": {"json.loads": 1},
    # The libraries of tensors map files that were checked just before.
    "clearhead/checkpoints/weights/files.py": {"safe_open": 3, ".open": 1},
    "clearhead/checkpoints/hf/files/tensor_files.py": {"safe_open": 1, ".open": 3},
    "clearhead/interpret/view/arrays.py": {"np.load": 1},
    "clearhead/checkpoints/hf/files/from_bin.py": {"torch.load": 1},
    # Text of a run file that was read by the reader, or came from the command line; TOML as JSON, to be typed.
    "clearhead/model/saving.py": {"tomllib.loads": 4},
    "clearhead/checkpoints/runs/directory.py": {"tomllib.loads": 2, ".read_text": 1},
    "clearhead/apps/compare/runs.py": {"json.loads": 1},
    "clearhead/training/runfile/read.py": {"tomllib.loads": 2, "read_text_file": 1},
    "clearhead/training/parallel/sharded.py": {"safe_open": 1, ".open": 1, "json.loads": 1},
    # Files that the user names: run files, sweep files (as JSON, to be typed), texts, own parts.
    "clearhead/core/extensions/files.py": {".read_bytes": 1},
    "clearhead/core/extensions/modules.py": {".read_bytes": 1},
    "clearhead/apps/sweeps/api.py": {"read_text_file": 1, "tomllib.loads": 1},
    "clearhead/apps/sweeps/variations.py": {"read_text_file": 1, "tomllib.loads": 2, "json.loads": 1},
    "clearhead/apps/cli/train.py": {"read_text_file": 1},
    "clearhead/model/training.py": {"read_text_file": 1},
    "clearhead/apps/cli/texts.py": {"read_text_file": 1},
    "clearhead/apps/cli/outputs.py": {".open": 1},
    "clearhead/apps/lessons/lesson.py": {"read_text_file": 1},
    "clearhead/base/mapped_files.py": {".open": 1},
    "clearhead/training/data_files.py": {".open": 1},
    "clearhead/apps/recipes/draft.py": {".read_text": 1},
    # What this process wrote: prepared data, pages, pictures, appended metrics, records as JSON.
    "clearhead/checkpoints/weights/writer.py": {".open": 1},
    "clearhead/data/stores/store.py": {".open": 1, ".read_text": 1, "json.loads": 1, "np.memmap": 1},
    "clearhead/tasks/answer/store.py": {"json.loads": 1},
    "clearhead/checkpoints/runs/metrics.py": {".open": 1},
    "clearhead/apps/cli/serve.py": {"read_text_file": 1},
    "clearhead/interpret/difference/page.py": {".read_text": 1},
    "clearhead/interpret/explain/page.py": {".open": 1, ".read_text": 1},
    "clearhead/interpret/view/explorer/write.py": {".open": 1, ".read_text": 1},
    "clearhead/interpret/maps/attention_maps.py": {".open": 1},
    "clearhead/apps/cli/inspect.py": {"json.loads": 2},
    # The system's own files.
    "clearhead/fast/busy_waiting.py": {".read_text": 1},
    "clearhead/base/machine.py": {".read_text": 3},
    "clearhead/training/memory.py": {".read_text": 1},
    "clearhead/fast/native/abi.py": {".read_text": 1},
    "clearhead/fast/native/build.py": {".read_text": 1, ".read_bytes": 3, "os.open": 1, "open": 1},
    "clearhead/fast/probe.py": {".read_text": 1},
    "clearhead/fast/device_check.py": {".read_bytes": 1, ".read_text": 1, "json.loads": 1},
    "clearhead/fast/training/compiler.py": {".read_bytes": 1},
    "clearhead/apps/cli/console.py": {"os.open": 1},
    "clearhead/apps/cli/doctor.py": {".read_text": 1},
}


def readings(source: Source) -> Counter[str]:
    """Return the calls that open or parse a file directly, with their counts."""
    counts: Counter[str] = Counter()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS:
                counts[called] += 1
            elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                counts[f".{node.func.attr}"] += 1
    return counts


def test_files_of_models_and_runs_have_one_reader() -> None:
    sources = [source for source in package_sources() if source.path != READER and not source.path.startswith(DATA)]
    assert {source.path: dict(readings(source)) for source in sources if readings(source)} == ALLOWED


def test_the_rule_can_fail() -> None:
    text = "open(p); json.loads(t); path.read_text(); path.open('rb'); safe_open(p)"
    assert len(readings(Source.of(text))) == 5
