"""FLOPs read off a spec are those that torch counts while it computes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clearhead import spec
from clearhead.core import build
from clearhead.data.batches.base import count_batch
from clearhead.spec.cost import forward_flops, training_flops
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.token_counts import TokenCounts

VOCABULARY, ROWS, SOURCE, TARGET = 37, 3, 7, 5
TINY = Hyperparameters(layers=2, width=22, heads=6, head_size=2, feedforward=13, dropout=0.0)
SPECS = {
    "encoder": replace(TINY, family="encoder"),
    "encoder with an inner head layer": replace(TINY, family="encoder", output_transform=True, output_bias=True),
    "decoder": replace(TINY, family="decoder", norm_place="pre"),
    "decoder of this decade": replace(
        TINY, family="decoder", kv_heads=3, gated=True, qk_norm=True, positions="rotary", bias=False, norm="rms"
    ),
    "encoder-decoder": replace(TINY, encoder_layers=1, decoder_layers=3),
    "encoder-decoder, untied": replace(TINY, kv_heads=2, tie="none", positions="buckets", gated=True),
}


def models() -> dict[str, spec.Model]:
    models_by_name = {
        name: build_spec(hparams, source_vocab=VOCABULARY, target_vocab=VOCABULARY) for name, hparams in SPECS.items()
    }
    inner = (spec.Linear(size=17), spec.Activation(function="tanh"))
    pooled = spec.Head(layers=(*inner, spec.Pool(by="mean"), spec.Linear(size=11)))
    models_by_name |= {
        "experts": with_experts(models_by_name["decoder"]),
        "other widths": with_other_widths(models_by_name["encoder"]),
    }
    for name in ("encoder", "decoder", "encoder-decoder"):
        models_by_name[f"{name} with a pool"] = models_by_name[name].model_copy(update={"head": pooled})
    return models_by_name


def with_experts(model: spec.Model) -> spec.Model:
    """Two groups of layers run at three depths, and their feed-forward networks are mixtures."""
    layer = model.decoder.layers[0]
    expert = spec.FeedForward(size=17, gated=True, activation="silu")
    mixture = spec.MixtureOfExperts(count=5, top_k=2, expert=expert)
    branch = layer.steps[1].branches[0].model_copy(update={"function": mixture})
    mixed = spec.Layer(steps=(layer.steps[0], spec.Step(branches=(branch,))))
    shared = model.decoder.model_copy(update={"layers": (layer, mixed), "sharing": (1, 0, 1)})
    return model.model_copy(update={"decoder": shared})


def with_other_widths(model: spec.Model) -> spec.Model:
    """The embedding is narrower than the stack."""
    projection = spec.Projection(place="after_norm", bias=True)
    embedding = model.encoder.embedding.model_copy(update={"width": 14, "projection": projection})
    head = spec.Head(layers=(spec.Linear(size=14), *model.head.layers))
    return model.model_copy(update={"encoder": model.encoder.model_copy(update={"embedding": embedding}), "head": head})


def count_flops(model: spec.Model, *, backward: bool) -> tuple[int, TokenCounts]:
    """Return what torch counts for one batch without padding, and the work of that batch."""
    two = model.encoder is not None and model.decoder is not None
    ids, target_ids = torch.randint(VOCABULARY, (ROWS, SOURCE)), torch.randint(VOCABULARY, (ROWS, TARGET))
    module = build(model)
    with FlopCounterMode(display=False) as counter:
        logits = module(ids, target_ids if two else None).logits
        if backward:
            logits.sum().backward()
    batch = SimpleNamespace(
        ids=ids,
        mask=None,
        target_ids=target_ids if two else None,
        target_mask=None,
        num_labels=ROWS * (TARGET if two else SOURCE),
        num_tokens=ROWS * (SOURCE + TARGET),
    )
    return counter.get_total_flops(), count_batch(batch)


@pytest.mark.parametrize("name", models())
def test_the_formula_is_what_torch_counts(name: str) -> None:
    model = models()[name]
    flops, work = count_flops(model, backward=False)
    assert forward_flops(model, work) == flops
    flops, work = count_flops(model, backward=True)
    assert training_flops(model, work) == flops


def test_distances_cost_a_product_with_each_row_of_their_table() -> None:
    """The table itself is projected once for each call, whatever the text: that is left out."""
    model, span = models()["encoder"], 3
    terms = ("content_to_position", "position_to_content")
    bias = spec.Disentangled(table=spec.Reference(path="encoder.score_table"), terms=terms)
    step = model.encoder.layers[0].steps[0]
    attention = step.branches[0].function.model_copy(update={"score_bias": bias})
    layer = spec.Layer(steps=(spec.Step(branches=(spec.Branch(function=attention),)),))
    stack = model.encoder.model_copy(update={"layers": (layer,), "score_table": spec.DistanceTable(span=span)})
    model = model.model_copy(update={"encoder": stack})
    flops, work = count_flops(model, backward=False)
    table = 2 * (2 * span) * TINY.width * TINY.heads * TINY.head_size * len(terms)
    assert forward_flops(model, work) == flops - table


def test_work_without_a_head_or_without_text() -> None:
    model = models()["encoder-decoder"]
    assert training_flops(model, TokenCounts()) == 0
    outputs = TokenCounts(tokens=1, outputs=1)
    assert training_flops(model, outputs) == 3 * 2 * TINY.width * VOCABULARY
    assert training_flops(model.model_copy(update={"head": None}), outputs) == 0
