"""A public call on a loaded model allocates no tensor as large as its weights; derived weights are made once.

Kernels serve every call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead import spec
from clearhead.fast import runner
from clearhead.fast.probe import has_fast_bf16
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.task_heads import label_head, token_head, vector_head
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

VOCABULARY, WIDTH = 1009, 32
TEXT, OTHER = "w3 w1 w4 w1 w5", "w9 w2 w6"
SMALL = {"layers": 2, "width": WIDTH, "heads": 2, "feedforward": 48, "dropout": 0.1}
PRECISIONS = ("fp32", "bf16", "auto", "int8")


class Outputs(TorchDispatchMode):
    """Records the operations with outputs as large as a table, except views of existing tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.large: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {storage_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel() >= VOCABULARY * WIDTH and storage_address(leaf) not in known:
                self.large.append(f"{func} {tuple(leaf.shape)}")
        return result


def storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tokenizer() -> Tokenizer:
    words = [f"w{number}" for number in range(VOCABULARY - 5)]
    return train_tokenizer("word", [" ".join(words)], vocab_size=VOCABULARY, mask=True)


def save_model(folder: Path, record: TaskRecord, head: spec.Head | None = None, **sizes: Any) -> Path:
    """Save a model with random weights, whose largest tensors are its tables."""
    of = tokenizer()
    assert of.vocab_size == VOCABULARY
    chosen = build_spec(Hyperparameters(**SMALL, **sizes), source_vocab=VOCABULARY, target_vocab=VOCABULARY, head=head)
    module = ch.build(chosen).eval()
    assert max(weight.numel() for weight in module.parameters()) == VOCABULARY * WIDTH
    ch.Model(module, TokenizerPair(of, of, joint=True), record).save(folder)
    return folder


def folder_of(kind: str, folder: Path) -> Path:
    labels = {"labels": ("a", "b"), "label_kind": "single_label"}
    match kind:
        case "translate":
            return save_model(folder, TaskRecord(kind="translate"), family="encoder-decoder", tie="all")
        case "generate":
            return save_model(folder, TaskRecord(kind="generate"), family="decoder", tie="all")
        case "untied":
            return save_model(folder, TaskRecord(kind="generate"), family="decoder", tie="none")
        case "fill":
            return save_model(folder, TaskRecord(kind="fill"), family="encoder", tie="all")
        case "classify":
            return save_model(
                folder, TaskRecord(kind=kind, **labels), label_head(WIDTH, 2, pool="mean"), family="encoder"
            )
        case "tag":
            return save_model(folder, TaskRecord(kind="tag", labels=("O", "B-x")), token_head(2), family="encoder")
        case "answer":
            return save_model(folder, TaskRecord(kind="answer", is_paired=True), token_head(2), family="encoder")
        case _:
            return save_model(folder, TaskRecord(kind="embed"), vector_head(pool="mean"), family="encoder")


CALLS: dict[str, tuple[str, Callable[[ch.Model], object]]] = {
    "translate": ("translate", lambda model: model.translate([TEXT, OTHER], beam_size=2, max_length=5)),
    "translate greedily": ("translate", lambda model: model.translate(TEXT, beam_size=1, max_length=5)),
    "translate n best": ("translate", lambda model: model.translate_n_best(TEXT, n=2, max_length=5)),
    "score a target": ("translate", lambda model: model.score(TEXT, OTHER)),
    "generate": ("generate", lambda model: model.generate([TEXT, OTHER], max_new_tokens=5, temperature=0)),
    "sample": ("generate", lambda model: model.generate(TEXT, max_new_tokens=5, seed=1)),
    "search": ("generate", lambda model: model.generate(TEXT, max_new_tokens=5, beam_size=2)),
    "stream": ("generate", lambda model: list(model.stream(TEXT, max_new_tokens=5, seed=1))),
    "score": ("generate", lambda model: model.score([TEXT, OTHER])),
    "generate untied": ("untied", lambda model: model.generate(TEXT, max_new_tokens=5, temperature=0)),
    "score untied": ("untied", lambda model: model.score(TEXT)),
    "fill": ("fill", lambda model: model.fill(["w1 ___ w3", "___ w2"])),
    "classify": ("classify", lambda model: model.classify([TEXT, OTHER])),
    "tag": ("tag", lambda model: model.tag([TEXT, OTHER])),
    "answer": ("answer", lambda model: model.answer(TEXT, OTHER)),
    "embed": ("embed", lambda model: model.embed([TEXT, OTHER])),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("small-calls")
    return {kind: folder_of(kind, root / kind) for kind in dict(CALLS.values())}


def serving_kind(model: ch.Model, name: str, precision: str) -> str:
    """Return the kind of weights that the kernels of a call use."""
    is_exact = name.startswith("score")  # scores depend on no processor
    in_bf16 = not is_exact and has_fast_bf16(torch.device("cpu"))
    kinds = {"fp32": "float32", "bf16": "mixed", "int8": "int8", "auto": "mixed" if in_bf16 else "float32"}
    report = (model.runner.exact if is_exact else model.runner).report()
    assert {entry.detail for entry in report if entry.backend == "kernels"} <= {kinds[precision]}
    assert {entry.backend for entry in report} == {"kernels"}
    return kinds[precision]


def decodes(name: str) -> bool:
    return CALLS[name][0] in ("translate", "generate", "untied") and not name.startswith("score")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_makes_no_tensor_as_large_as_a_table(
    name: str, precision: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setattr(runner, "LEAST_WEIGHTS", 0)
    saved_as, call = CALLS[name]
    model = ch.load(folders[saved_as], device="cpu", precision=precision)
    kind = serving_kind(model, name, precision)
    call(model)
    calls.clear()
    with Outputs() as outputs:
        call(model)
    assert not outputs.large
    assert calls or (kind == "float32" and not decodes(name))


def test_what_is_as_large_as_a_table_is_seen() -> None:
    table = torch.zeros(VOCABULARY, WIDTH)
    with Outputs() as outputs:
        table[:5].clone()
        table.t().detach()
        table.half()
    assert len(outputs.large) == 1
