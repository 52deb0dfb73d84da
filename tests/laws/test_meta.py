"""A training step and a decoding step never wait for a GPU: on `meta`, each host read raises, for every family.

Tensors of `meta` take the branches of a GPU, and so does the training tree.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import Cache, Transformer, build
from clearhead.fast.training.tree import training_tree
from clearhead.generate.batching import pad_ids
from tests.laws.graphs_job import CASES, spec_of
from tests.laws.host_reads import HostRead, refuse_host_reads
from tests.laws.test_graphs import EXCEPTIONS
from tests.laws.tiny import MODELS, hparams, replace, resolve_spec

ARCHITECTURES = sorted(path.stem for path in CASES.glob("*.py") if path.stem != "__init__")
META = torch.device("meta")
ROWS = [[3, 4, 5, 6, 7, 3, 4], [5, 6, 7], [4, 3, 6, 5, 7, 4, 3, 6, 5]]


def spec_named(name: str) -> spec.Model:
    """Return the spec of a tiny model with dropout, or of the first case of a file of architectures."""
    if "/" in name:
        return resolve_spec(replace(hparams(name), dropout=0.1))
    return spec_of(importlib.import_module(f"tests.parity.architectures.cases.{name}").CASES[0])


def batch_of(module: Transformer) -> dict[str, Tensor]:
    """Return a padded batch on `meta` with the inputs of each stack."""
    ids, mask = pad_ids(ROWS, 0, META)
    batch = {"ids": ids, "mask": mask}
    if module.encoder is not None and module.decoder is not None:
        batch["target_ids"], batch["target_mask"] = pad_ids(ROWS[::-1], 0, META)
    return batch


def reads_host(step: Callable[[], Any]) -> bool:
    """Run a step twice, so that its tables exist in the second one; return whether it reads the host."""
    try:
        step()
        with refuse_host_reads():
            step()
    except (HostRead, NotImplementedError, RuntimeError) as error:
        assert isinstance(error, HostRead) or "meta" in str(error)
        return True
    return False


@pytest.mark.parametrize("name", [*MODELS, *ARCHITECTURES])
def test_a_training_step_reads_nothing(name: str) -> None:
    module = build(spec_named(name), device="meta")
    tree, batch = training_tree(module, "bf16"), batch_of(module)

    def step() -> None:
        output = tree(**batch)
        (output.hidden if output.logits is None else output.logits).float().square().mean().backward()

    assert reads_host(step) == (name in EXCEPTIONS)
    if name not in EXCEPTIONS:
        assert all(parameter.grad is not None for parameter in module.parameters() if parameter.dim() > 1)


@torch.no_grad()
@pytest.mark.parametrize("name", [*MODELS, *ARCHITECTURES])
def test_a_decoding_step_reads_nothing(name: str) -> None:
    module = build(spec_named(name), device="meta").eval()
    batch, tokens = batch_of(module), torch.empty(3, 1, dtype=torch.long, device=META)
    if module.decoder is None:
        assert not reads_host(lambda: module(**batch))
        return

    def step() -> None:
        module.decode(tokens, cache=cache)

    def read() -> None:
        if module.encoder is None:
            module(**batch, cache=cache)
        else:
            memory = module.encode(batch["ids"], mask=batch["mask"]).memory
            sources, targets = {"memory_mask": batch["mask"]}, {"target_mask": batch["target_mask"]}
            module.decode(batch["target_ids"], memory, **sources, **targets, cache=cache)

    cache = Cache()
    if name in EXCEPTIONS:
        assert reads_host(read)
    else:
        read()
        assert not reads_host(step)
