"""Difference between two models: `clearhead.diff`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from clearhead.base.arguments import check_types
from clearhead.base.errors import at_text, within
from clearhead.base.progress import counter
from clearhead.checkpoints.stored_weights import ModuleWeights, StoredWeights, open_weights
from clearhead.generate.batching import check_lengths
from clearhead.interpret.difference.outputs import TextChanges, check_same_inputs, compare_texts
from clearhead.interpret.difference.report import Difference
from clearhead.interpret.difference.weights import compare_weights
from clearhead.interpret.maps.map_inputs import MapInputs
from clearhead.model.facade import Model
from clearhead.model.loading import load

ModelOrReference = Model | str | Path


@check_types
def diff(
    a: ModelOrReference,
    b: ModelOrReference,
    texts: str | Sequence[str] = (),
    *,
    device: str = "auto",
    precision: str = "fp32",
) -> Difference:
    """Return the changes from one model to another: weights, and with texts also heads and predictions.

    Weights are compared where addresses and shapes agree. A table with more rows is compared on the common rows.
    Without texts, a model given as a reference is not loaded: its weights are read a few rows at a time.

    Args:
        a, b: the model before and the model after, each a `Model` or a reference for `load`.
        texts: texts that both models read. A decoder after an encoder reads the text that model A generates.
        device, precision: same as in `load`, for models that read texts.

    Raises:
        InputError: a model is missing, no weight can be compared, the models read different tokens, or a text cannot
            be read. The message has the number of this text.
    """
    every = [texts] if isinstance(texts, str) else list(texts)
    names = [str(item) if isinstance(item, str | Path) else name for item, name in ((a, "A"), (b, "B"))]
    weights = compare_weights(_open(a, names[0]), _open(b, names[1]))
    difference = Difference(names[0], names[1], weights)
    if not every:
        return difference
    loaded = [item if isinstance(item, Model) else load(item, device=device, precision=precision) for item in (a, b)]
    return difference.with_texts(_compare_on_texts(loaded[0], loaded[1], every), loaded[0].tokenizers)


def _open(model: ModelOrReference, name: str) -> StoredWeights:
    return ModuleWeights(name, model.module) if isinstance(model, Model) else open_weights(str(model))


def _compare_on_texts(a: Model, b: Model, texts: Sequence[str]) -> TextChanges:
    """Compare both models on the texts, with the tokens of the smaller vocabulary, which both models know."""
    check_same_inputs(a, b)
    reader = min((a, b), key=lambda model: model.tokenizers.source.vocab_size)
    tell = counter("texts")

    def readings() -> Iterator[MapInputs]:
        for number, text in enumerate(texts, start=1):
            with within(at_text(number)):
                reading = reader.read(text)
                for stack in filter(None, (reading.source, reading.target)):
                    for model in (a, b):
                        check_lengths(stack.ids.tolist(), model.module.max_positions, noun="text")
            yield reading
            tell(number, len(texts))

    return compare_texts(a, b, readings())
