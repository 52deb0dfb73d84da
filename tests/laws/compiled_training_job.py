"""Compare compiled training trees with eager ones in a separate process, without the import hook that checks shapes.

Run as python -m tests.laws.compiled_training_job BACKEND, it prints a JSON object: for each model the number of graphs
after ten batches and a validation, and the largest differences of loss and gradients over all batches. Gradients are
compared by the largest gradient of the model, since the gradient of a key's bias is rounding alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from clearhead.checkpoints.weights.lora import adapt
from clearhead.core import build
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.data.batches.base import Batch
from clearhead.fast.replica import replica
from clearhead.fast.training import compiled
from clearhead.fast.training.tree import training_tree
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.tasks.train import token_loss

VOCAB: Final = 29
SHAPES: Final = [
    (3, 7, 5), (2, 13, 11), (2, 80, 70), (5, 12, 3), (2, 100, 5), (1, 20, 90), (7, 7, 7), (2, 3, 2), (4, 64, 65),
    (3, 9, 9),
]  # fmt: skip
"""Rows, source tokens and target tokens of each batch."""
ONE_LENGTH: Final = [(rows, 11, 11) for rows in (4, 3, 1, 4, 2, 4, 3, 2, 1, 4)]


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how it is compiled."""

    sizes: dict[str, Any]
    full: compiled.FullBatch | None = None
    is_padded: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    uses_lora: bool = False


MODERN: Final = {
    "norm_place": "pre", "norm": "rms", "heads": 4, "kv_heads": 2, "gated": True, "activation": "silu",
    "positions": "rotary", "qk_norm": True,
}  # fmt: skip
INDUCTOR: Final = {
    "encoder-decoder": Case({"family": "encoder-decoder"}),
    "decoder of one length": Case(
        {"family": "decoder", **MODERN}, compiled.FullBatch(4, 11, has_mask=False), is_padded=False
    ),
}
DYNAMO: Final = {
    "encoder, learned positions": Case({"family": "encoder", "positions": "learned"}),
    "decoder, buckets": Case({"family": "decoder", "positions": "buckets"}),
    "decoder, ALiBi, LoRA": Case({"family": "decoder", "positions": "alibi"}, uses_lora=True),
    "decoder, rotary, recomputed layers": Case({"family": "decoder", **MODERN}, options={"recomputes_layers": True}),
    "encoder-decoder by layer": Case({"family": "encoder-decoder", "layers": 2}, options={"by_layer": True}),
}


def make_batch(case: Case, shape: tuple[int, int, int]) -> Batch:
    """Draw a batch; its first row has no padding."""
    rows, source, target = shape
    has_target = case.sizes["family"] == "encoder-decoder"
    length = target if has_target else source
    lengths = torch.randint(1, source + 1, (rows, 1)).index_fill_(0, torch.tensor(0), source)
    mask = torch.arange(source) < lengths if case.is_padded else None
    labels = torch.randint(VOCAB, (rows, length))
    if mask is not None and not has_target:
        labels = labels.masked_fill(~mask, NO_LABEL)
    return Batch(
        ids=torch.randint(VOCAB, (rows, source)),
        mask=mask,
        labels=labels,
        num_labels=int((labels != NO_LABEL).sum()),
        num_tokens=rows * source,
        rows=torch.arange(rows).numpy(),
        target_ids=torch.randint(VOCAB, (rows, target)) if has_target else None,
        target_mask=None,
    )


def run_batch(tree: nn.Module, batch: Batch) -> tuple[float, list[Tensor]]:
    """Return the mean loss of a batch, and the gradients of its sum."""
    tree.zero_grad(set_to_none=True)
    total, labels = token_loss(tree, batch, label_smoothing=0.1)
    total.backward()
    gradients = [weight.grad.clone() for weight in tree.parameters() if weight.grad is not None]
    assert len(gradients) > 3
    return float(total.detach()) / labels, gradients


def measure(case: Case) -> dict[str, float]:
    """Return graphs and differences of a case."""
    torch.manual_seed(0)
    sizes = {"layers": 1, "width": 16, "heads": 2, "feedforward": 24, "dropout": 0.0, **case.sizes}
    module = build(build_spec(Hyperparameters(**sizes), source_vocab=VOCAB, target_vocab=VOCAB))
    if case.uses_lora:
        adapt(module, rank=2)
    eager = replica(module, is_training=True)
    tree = training_tree(module, "fp32", compiles=True, full=case.full, **case.options)
    before, loss, gradient = compiled.count_graphs(), 0.0, 0.0
    for shape in ONE_LENGTH if case.full is not None else SHAPES:
        batch = make_batch(case, shape)
        (expected, wanted), (actual, got) = run_batch(eager, batch), run_batch(tree, batch)
        largest = max(float(each.abs().max()) for each in wanted)
        loss = max(loss, abs(actual - expected) / abs(expected))
        differences = [float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)]
        gradient = max(gradient, max(differences) / largest)
    with torch.no_grad():
        token_loss(tree.eval(), make_batch(case, (6, 17, 19)), label_smoothing=0.0)
    return {"graphs": compiled.count_graphs() - before, "loss": loss, "gradient": gradient}


def use_backend(patch: pytest.MonkeyPatch, backend: str) -> None:
    """Compile without Inductor, which takes half a minute: by Dynamo alone (eager), or with AOTAutograd (aot_eager)."""
    compile_by_inductor = torch.compile

    def compile_by_dynamo(method: Any, *, dynamic: bool, **_options: object) -> Any:
        limit = compiled.MOST_GRAPHS
        return compile_by_inductor(method, fullgraph=True, dynamic=dynamic, backend=backend, recompile_limit=limit)

    patch.setattr(torch, "compile", compile_by_dynamo)


def main() -> None:
    """Print the measurements of all cases of a backend: inductor, or eager (Dynamo alone)."""
    torch.set_num_threads(1)
    (backend,) = sys.argv[1:]
    if backend != "inductor":
        use_backend(pytest.MonkeyPatch(), backend)
    cases = INDUCTOR if backend == "inductor" else DYNAMO
    print(json.dumps({name: measure(case) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
