"""The shapes that a spec promises are those of a real call, for every kind of model."""

from __future__ import annotations

import itertools

import pytest
import torch

from clearhead import spec
from clearhead.core import Transformer, build
from clearhead.core.attention import MemoryAttention
from clearhead.interpret.maps.hook_points import addresses, capture
from clearhead.interpret.maps.shapes import Axis, activation_shapes
from clearhead.spec.presets.task_heads import label_head, vector_head, with_head
from tests.hf_specs import hf_specs
from tests.laws.hf_parts import HF_PARTS
from tests.laws.tiny import FAMILIES, POSITIONS, STYLES, hparams, resolve_spec

BATCH, SOURCE, TARGET = 3, 7, 5
SIZES = {"batch": BATCH, "tokens": SOURCE, "source": SOURCE, "target": TARGET}
NAMES = [
    f"{family}/{style}/{position}"
    for (family, style), position in zip(itertools.product(FAMILIES, STYLES), itertools.cycle(POSITIONS), strict=False)
]
# The parts that change a shape, or that ask about values, which a model without values cannot answer.
PARTS = [
    "query-key norm per head", "query-key norm over the width", "sink on the memory", "rotation dynamic",
    "rotation long-rope", "disentangled", "disentangled, own projections", "experts",
    "projection after the norm", "shared layers with a memory",
]  # fmt: skip
FROM_CONFIGS = ["albert", "bart", "gpt_oss", "modernbert/mean", "opt/after", "t5gemma"]


def real_shapes(module: Transformer, has_two_stacks: bool) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of all records of a real call, by address."""
    source, target = (torch.zeros(BATCH, tokens, dtype=torch.long) for tokens in (SOURCE, TARGET))
    with torch.no_grad(), capture(module, "**") as seen:
        module(source, target if has_two_stacks else None)
    assert list(seen) == addresses(module)
    # What an expert computes depends on the tokens that chose it, so no shape can be promised.
    known = {address: records for address, records in seen.items() if records and ".expert." not in address}
    return {address: [tuple(activation.tensor.shape) for activation in records] for address, records in known.items()}


def sizes_of(axis: Axis, matrix: dict[str, int]) -> set[int]:
    """Return the sizes that a named axis can have in the real call."""
    known = SIZES | matrix
    sizes = set()
    for choice in str(axis).split("|"):
        size = 1
        for factor in choice.split("*"):
            size *= known[factor] if factor in known else int(factor)
        sizes.add(size)
    return sizes


def check(model: spec.Model) -> None:
    module, has_two_stacks = build(model).eval(), model.encoder is not None and model.decoder is not None
    real, shown = real_shapes(module, has_two_stacks), activation_shapes(model)
    assert [activation.address for activation in shown] == list(real)
    parts = dict(module.named_modules())
    for activation in shown:
        num_tokens = TARGET if has_two_stacks and activation.address.startswith("decoder") else SOURCE
        keys = SOURCE if isinstance(parts.get(activation.address.rpartition(".")[0]), MemoryAttention) else num_tokens
        axes = [sizes_of(axis, {"queries": num_tokens, "keys": keys}) for axis in activation.shape]
        seen = [set(sizes) for sizes in zip(*real[activation.address], strict=True)]
        assert axes == seen and activation.records == len(real[activation.address]), (
            activation,
            real[activation.address],
        )


@pytest.mark.parametrize("name", NAMES)
def test_shapes_of_all_families(name: str) -> None:
    check(resolve_spec(hparams(name)))


@pytest.mark.parametrize("name", PARTS)
def test_shapes_of_rare_parts(name: str) -> None:
    check(HF_PARTS[name]())


@pytest.mark.parametrize("name", FROM_CONFIGS)
def test_shapes_of_checkpoints(name: str) -> None:
    check(hf_specs()[name])


def test_shapes_of_other_heads() -> None:
    model = resolve_spec(hparams("encoder/post/rotary"))
    check(with_head(model, label_head(14, 3, pool="mean")))
    check(with_head(model, vector_head(pool="last")))


def test_axes_have_names() -> None:
    shapes = {activation.address: activation for activation in activation_shapes(HF_PARTS["experts"]())}
    attention, mixture = (f"decoder.layers.1.steps.{step}.branches.0.function" for step in (0, 1))
    assert shapes["hidden"].shape == ("batch", "tokens", 14)
    assert shapes[f"{attention}.keys"].shape == ("batch", 2, "tokens", 10)
    assert shapes[f"{attention}.weights"].shape == ("batch", 6, "queries", "keys")
    assert shapes[f"{mixture}.router"].shape == ("batch*tokens", 5)
    assert f"{mixture}.expert" not in shapes
    assert shapes["decoder.layers.0.steps.0.out"].is_identity and not shapes["decoder.final_norm"].is_identity


def test_a_table_of_two_stacks_is_read_twice() -> None:
    model = hf_specs()["bart"]
    table = {activation.address: activation for activation in activation_shapes(model)}["encoder.embedding.table"]
    assert table.shape == ("batch", "source|target", model.encoder.width) and table.records == 2


def test_nothing_is_allocated() -> None:
    """A model of a billion parameters has shapes too."""
    model = resolve_spec(hparams("decoder/post/rotary"))
    table = model.decoder.embedding.model_copy(update={"table": spec.Table(rows=2**26)})
    wide = spec.Model(decoder=model.decoder.model_copy(update={"embedding": table}))
    assert activation_shapes(wide)[0].shape == ("batch", "tokens", 14)
