"""Loading and using a model of any task imports no training code, not even by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import clearhead as ch
from clearhead import spec
from clearhead.core import build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.task_heads import label_head, token_head, vector_head
from clearhead.spec.tasks.record import Noise, TaskRecord
from clearhead.spec.tasks.registry import BUILT_IN
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer

TEXTS = ["Ada sleeps here", "Ida runs there"]
LABELS, TAGS = ("early", "late"), ("O", "B-PER")
# The head, what the record says, what is predicted, and examples to measure it on.
TASKS: dict[str, tuple[spec.Head | None, dict[str, Any], list[Any], list[Any]]] = {
    "translate": (None, {}, TEXTS, [*zip(TEXTS, TEXTS, strict=True)]),
    "generate": (None, {}, TEXTS, TEXTS),
    "fill": (None, {"noise": Noise(kind="mask", share=0.3)}, ["Ada ___ here"], TEXTS),
    "classify": (
        label_head(14, 2, pool="mean"),
        {"labels": LABELS, "label_kind": "single_label"},
        TEXTS,
        [*zip(TEXTS, LABELS, strict=True)],
    ),
    "tag": (token_head(2), {"labels": TAGS}, TEXTS, [(["Ada", "sleeps"], ["B-PER", "O"]), (["Ida"], ["B-PER"])]),
    "embed": (vector_head(pool="mean"), {}, TEXTS, [*zip(TEXTS, ("a", "b"), strict=True)]),
    "denoise": (None, {"noise": Noise(kind="infill", share=0.3, mean_span=2.0)}, TEXTS, TEXTS),
    "answer": (
        token_head(2),
        {"is_paired": True, "answer_tokens": 5},
        [["Who sleeps?", TEXTS[0]]],
        [("Who sleeps?", TEXTS[0], "Ada", 0)],
    ),
}
FAMILIES: dict[str, Any] = {"translate": "encoder-decoder", "denoise": "encoder-decoder", "generate": "decoder"}
JOB = """
import json, sys
import clearhead

for kind, (texts, examples) in json.loads(sys.argv[1]).items():
    model = clearhead.load(kind)
    assert len(model.predict(texts)) == len(texts), kind
    assert len(model.evaluate(examples, batch_size=2)) > 1, kind
    model.attention(texts[0] if isinstance(texts[0], str) else tuple(texts[0]))
    print(kind, model.task.kind)
print(*(name for name in sys.modules if name.split(".")[:2] == ["clearhead", "training"] or name.endswith(".train")))
"""


def save_tiny(kind: str, folder: Path) -> None:
    """Save a model of a task with random weights."""
    tokenizer = train_tokenizer("byte", TEXTS, vocab_size=300, mask=True)
    head, facts, _, _ = TASKS[kind]
    sizes = Hyperparameters(family=FAMILIES.get(kind, "encoder"), layers=1, width=14, heads=2, feedforward=18)
    size = tokenizer.vocab_size
    model = build_spec(sizes, source_vocab=size, target_vocab=size, head=head)
    record = TaskRecord(kind=kind, max_length=64, **facts)
    ch.Model(build(model).eval(), TokenizerPair(tokenizer, tokenizer, True), record).save(folder / kind)


def test_using_a_model_of_any_task_never_imports_training(tmp_path: Path) -> None:
    torch.manual_seed(1)
    assert TASKS.keys() == {*BUILT_IN}
    for kind in TASKS:
        save_tiny(kind, tmp_path)
    arguments = json.dumps({kind: (texts, examples) for kind, (_, _, texts, examples) in TASKS.items()})
    job = [sys.executable, "-c", JOB, arguments]
    done = subprocess.run(job, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    *used, imported = done.stdout.split("\n")[:-1]
    assert used == [f"{kind} {kind}" for kind in TASKS]
    assert imported == ""
