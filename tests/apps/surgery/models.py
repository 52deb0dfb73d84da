"""Tiny models with every module of the core and of every family; no weight is 0 or 1, so that a lost weight shows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead import spec
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.core import Output, Transformer, build
from tests.laws.hf_parts import hf_part
from tests.laws.tiny import MODELS, tiny
from tests.parity.architectures.harness import Case, all_cases

BOTH = [name for name in MODELS if name.startswith("encoder-decoder/")]
FAMILIES: dict[str, Case] = {}
for case in all_cases():
    FAMILIES.setdefault(case.name.split("/")[0], case)


def build_model(name: str) -> Transformer:
    """Build a tiny model by its name."""
    return scramble(tiny(name)) if name in MODELS else hf_part(name)


def family(case: Case) -> Transformer:
    """Build the tiny model of a family from its record, without files."""
    record = registry.all_families()[case.model_type]
    reading = configs.parse(record, case.config)
    assert not reading.faults
    return scramble(build(record.spec_of(reading.values, case.variant)).eval())


def scramble(module: Transformer) -> Transformer:
    """Move every weight away from zero and one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def run(module: Transformer, rows: int = 2, length: int = 7, vocab: int | None = None) -> Output:
    """Run a model on random ids; a decoder with cross-attention gets a padded memory."""
    source = torch.randint(vocab or module.num_source_ids, (rows, length))
    if module.encoder is None or module.decoder is None:
        return module(source)
    mask = torch.arange(length) < torch.tensor([length, length - 2])[:rows, None]
    target = torch.randint(vocab or module.num_target_ids, (rows, length - 2))
    return module(source, target, mask=mask)


def same_run(module: Transformer, *, vocab: int | None = None, seed: int = 3) -> Output:
    """Run a model on ids that depend only on the vocabulary."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return run(module, vocab=vocab)


def attentions(model: spec.Model) -> Iterator[tuple[str, spec.Attention]]:
    """Yield every attention with its address."""
    return ((path, node) for path, node in spec.walk(model) if isinstance(node, spec.Attention))
