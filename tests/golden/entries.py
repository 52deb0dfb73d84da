"""Computations of a golden record: a short run of every task, five converted checkpoints, pages of the explorer."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

import clearhead as ch
from tests.apps.cli.tiny_run import PAIRS, write_run_file
from tests.apps.cli.tiny_tasks import write_task
from tests.golden.records import Entry
from tests.parity.architectures.harness import Pair, all_cases

Entries = Mapping[str, Entry]
STEPS, DROPOUT = 20, 0.1
TASKS = ("translate", "generate", "fill", "classify", "tag", "embed", "denoise", "answer")
CHECKPOINTS = ("gpt2", "llama", "bert", "t5", "bart")
"""Names of cases of the parity tests."""
TEXTS = ["a m u", "b n v w"]
INPUTS: Mapping[str, Any] = {
    "fill": ["a ___ u", "___ n v"],
    "answer": [("a", text) for text in TEXTS],
}
"""The texts for predictions of tasks with another form of input."""
RUN_FIELDS = ("step", "tokens", "loss", "learning_rate", "valid_loss", "valid_score")
"""Fields of `metrics.jsonl` that do not depend on time."""


def record_all(report: Callable[[str], None] = lambda line: None, device: str = "cpu") -> dict[str, Entry]:
    """Return the entries of every computation.

    Args:
        report: function that gets one line before each computation.
        device: the device that computes the entries: "cpu", "cuda" or "mps".
    """
    torch.set_num_threads(1)
    entries: dict[str, Entry] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in TASKS:
            report(f"training: {kind}")
            entries.update(record_run(kind, Path(folder) / kind, device))
        for name in CHECKPOINTS:
            report(f"checkpoint: {name}")
            entries.update(record_checkpoint(name, Path(folder) / f"checkpoint-{name}", device))
    return entries


def record_run(kind: str, folder: Path, device: str = "cpu") -> Entries:
    """Train a tiny model of one task for 20 steps with dropout; return its weights, losses, predictions and pages."""
    folder.mkdir()
    file = write_run_file(folder) if kind == "translate" else write_task(folder, kind)
    overrides: dict[str, object] = {"train.steps": STEPS, "train.validate_every": STEPS // 2, "model.dropout": DROPOUT}
    overrides["train.device"] = device
    with contextlib.redirect_stderr(io.StringIO()):
        ch.train(file, overrides=overrides)
    run = folder / "run"
    checkpoint = run / "checkpoints" / f"step-{STEPS}"
    entries: dict[str, Entry] = {}
    for group, name in (("weights", "weights"), ("optimizer", "optimizer")):
        tensors = load_file(checkpoint / f"{name}.safetensors")
        entries |= {f"{group}/{kind}/{key}": Entry.of_array(tensor) for key, tensor in tensors.items()}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    for field in RUN_FIELDS:
        values = [row[field] for row in rows]
        is_number = all(value is not None for value in values)
        entries[f"metrics/{kind}/{field}"] = Entry.of_array(np.array(values)) if is_number else Entry.of_json(values)
    model = ch.load(f"{run}@last", device=device, precision="fp32")
    predictions = predict(model, kind)
    is_array = isinstance(predictions, np.ndarray)
    entries[f"predictions/{kind}"] = Entry.of_array(predictions) if is_array else Entry.of_json(predictions)
    if kind != "answer":
        entries |= record_page(kind, model, folder / "page.html")
    return entries


def predict(model: ch.Model, kind: str) -> Any:
    """Return the predictions of a model for a few texts; text is continued by the most probable tokens."""
    if kind == "generate":
        return [model.generate(text, max_new_tokens=9, temperature=0)[0].text for text in TEXTS]
    if kind == "translate":
        sources = [source for source, _ in PAIRS[::31]]
        return model.translate_n_best(sources, n=2, beam_size=3)
    return model.predict(INPUTS.get(kind, TEXTS))


def record_page(kind: str, model: ch.Model, file: Path) -> Entries:
    """Write the explorer's page of one text and return its data: facts, tokens and compressed weights."""
    target = "u a" if kind == "translate" else None
    maps = model.attention("a m u", target=target)
    maps.save_html(file)
    blocks = read_page(file.read_text("utf-8"))
    entries = {f"page/{kind}/{name}": Entry.of_json(content) for name, content in blocks}
    for head in maps.heads():
        entries[f"heads/{kind}/{head.stack}.{head.layer}.{head.head}"] = Entry.of_json(head)
    return entries


def read_page(html: str) -> Iterator[tuple[str, Any]]:
    """Yield name and content of every block of data in a page of the explorer."""
    pattern = r'<script type="(application/json|text/plain)" id="([^"]+)">(.*?)</script>'
    for form, name, content in re.findall(pattern, html, re.DOTALL):
        yield name, json.loads(content) if form == "application/json" else content


@torch.no_grad()
def record_checkpoint(name: str, folder: Path, device: str = "cpu") -> Entries:
    """Convert a checkpoint that transformers made; return its logits and the KV cache after two calls."""
    case = next(case for case in all_cases() if case.name == name)
    torch.manual_seed(11)
    module = Pair.of(case, folder).ours.to(device)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, case.vocab, (3, 11), generator=generator).to(device)
    target = torch.randint(1, case.vocab, (3, 7), generator=generator).to(device)
    if module.decoder is None:
        output = module(ids)
        return _tensors(f"logits/{name}", [output.hidden if output.logits is None else output.logits])
    cache = ch.Cache()
    if module.encoder is None:
        outputs = [module(ids[:, :8], cache=cache), module(ids[:, 8:], cache=cache)]
    else:
        outputs = [module(ids, target[:, :4], cache=cache), module(ids, target[:, 4:], cache=cache)]
    logits = [output.logits for output in outputs]
    buffers = [values.buffer[:, :, :, : values.length] for values in cache.self_attention.values()]
    memory = [torch.stack(pair) for pair in cache.memory_attention.values()]
    return {
        **_tensors(f"logits/{name}", logits),
        **_tensors(f"cache/{name}/self", buffers),
        **_tensors(f"cache/{name}/memory", memory),
    }


def _tensors(name: str, tensors: list[Tensor]) -> Entries:
    return {f"{name}/{number}": Entry.of_array(tensor.cpu().numpy()) for number, tensor in enumerate(tensors)}
