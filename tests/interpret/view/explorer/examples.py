"""Example pages with random numbers: heads as peaked as in trained models, in every kind of stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from clearhead.interpret.view.explorer.data import (
    BeamNode,
    ExactHead,
    HeadColumn,
    LayerAttention,
    Page,
    PageLens,
    RowName,
    Sample,
    StackAttention,
    TokenRow,
)

COLUMNS = (
    HeadColumn("entropy", "entropy", "Entropy of the weights, in nats: low where a head looks at few tokens."),
    HeadColumn("distance", "mean distance", "How many tokens lie between a query and what it looks at, on average."),
    HeadColumn("first", "first token", "The share of the attention on the first token."),
    HeadColumn("previous", "previous token", "The share of the attention on the token before."),
    HeadColumn(
        "effect",
        "effect",
        "How much the log-probability of the output changes when the head is switched off.",
        kind="effect",
    ),
)
TEXT = "The cat sat on the mat because it was tired ; the dog , un believ ably loud , did not care about the cat ."


def token_row(words: Sequence[str], *, generated: int = 0) -> TokenRow:
    """Return one token per string; a string that starts with a space starts a word."""
    starts = [index == 0 or word[:1] in " \n" for index, word in enumerate(words)]
    is_generated = np.arange(len(words)) >= len(words) - generated if generated else None
    return TokenRow(tuple(word.replace(" ", "Ġ") for word in words), tuple(words), np.cumsum(starts) - 1, is_generated)


def example_row(size: int) -> TokenRow:
    """Return a text of `size` tokens, with subwords and a line break."""
    parts = TEXT.replace("un believ ably", "un|believ|ably").split(" ")
    parts = [piece for word in parts for piece in [" " + word.split("|")[0], *word.split("|")[1:]]]
    parts[0] = parts[0][1:]
    return token_row([["\n", *parts][index % (len(parts) + 1)] if index else parts[0] for index in range(size)])


def peaked_scores(
    rng: np.random.Generator, kind: int, size: tuple[int, int], head_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random queries and keys, and a bias that makes the head one of six kinds."""
    query, key = rng.normal(size=(size[0], head_size)), rng.normal(size=(size[1], head_size))
    distance = np.arange(size[0])[:, None] - np.arange(size[1])[None]
    strength = rng.uniform(3, 9)
    bias = [
        strength * (distance == 1),
        -0.4 * np.abs(distance),
        strength * (np.arange(size[1]) == 0) * np.ones(size),
        strength * (distance == 0),
        strength * (distance % 27 == 26) * (distance > 0),
        np.zeros(size),
    ][kind % 6]
    return query.astype(np.float32), key.astype(np.float32), (bias + 0.0).astype(np.float32)


def softmax(scores: np.ndarray, sink: float | None) -> np.ndarray:
    most = np.maximum(scores.max(axis=-1, keepdims=True), -1e30)
    shares = np.exp(scores - most)
    total = shares.sum(axis=-1, keepdims=True) + (0 if sink is None else np.exp(sink - most))
    return shares / np.where(total == 0, 1, total)


def mask_of(kind: str, size: tuple[int, int]) -> np.ndarray | None:
    distance = np.arange(size[0])[:, None] - np.arange(size[1])[None]
    return {"full": None, "causal": distance >= 0, "window": (distance >= 0) & (distance <= 7)}[kind]


def layer_attention(
    rng: np.random.Generator,
    layer: int,
    size: tuple[int, int],
    *,
    heads: int = 12,
    kv_heads: int = 12,
    mask: Literal["full", "causal", "window"] = "causal",
    has_sink: bool = False,
    exact: Sequence[int] = (),
) -> LayerAttention:
    """A layer whose weights follow from its queries and keys; the first heads may be exact."""
    allowed = mask_of(mask, size)
    head_size = 8
    numbers, weights = {}, []
    for head in range(heads):
        query, key, bias = peaked_scores(rng, layer + head, size, head_size)
        sink = float(np.float32(rng.normal() + 1)) if has_sink else None
        numbers[head] = ExactHead(query, key, head_size**-0.5, bias=bias, sink=sink)
        scores = (query.astype(np.float64) @ key.astype(np.float64).T) * head_size**-0.5 + bias
        weights.append(softmax(scores if allowed is None else np.where(allowed, scores, -np.inf), sink))
    stacked = np.stack(weights).astype(np.float32)
    return LayerAttention(
        layer, tuple(range(heads)), heads, kv_heads, lambda: stacked, allowed,
        {"full": "full", "causal": "causal", "window": "window: 7 before, 0 after"}[mask],
        has_sink=has_sink, exact={head: numbers[head] for head in exact}, values=statistics(stacked, rng),
        patterns=tuple(pattern(head) for head in stacked),
        feed_forward={"effect": float(np.float32(rng.normal()))},
    )  # fmt: skip


def statistics(weights: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    heads, queries, keys = weights.shape
    distance = np.abs(np.arange(queries)[:, None] - np.arange(keys)[None])
    statistics_by_name = {
        "entropy": -(weights * np.log(np.maximum(weights, 1e-30))).sum(axis=2).mean(axis=1),
        "distance": (weights * distance).sum(axis=2).mean(axis=1),
        "first": weights[:, :, 0].mean(axis=1),
        "previous": np.array([np.diagonal(head, -1).mean() for head in weights]),
        "effect": rng.normal(size=heads) ** 3,
    }
    return {name: values.astype(np.float32) for name, values in statistics_by_name.items()}


def pattern(head: np.ndarray) -> str:
    scores = {
        "previous token": np.diagonal(head, -1).mean(),
        "first token": head[:, 0].mean(),
        "same token": np.diagonal(head).mean(),
    }
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > 0.5 else ""


def decoder_page(
    size: int = 31, *, layers: int = 3, heads: int = 5, exact: Sequence[int] = (2,), label: str = "one text"
) -> Page:
    """Return a page of a causal decoder; its last layer has a window and a sink."""
    return Page("a small decoder", (decoder_sample(size, layers=layers, heads=heads, exact=exact, label=label),),
                facts=(("parameters", "124 million"), ("layers", str(layers))))  # fmt: skip


def decoder_sample(
    size: int, *, layers: int, heads: int, exact: Sequence[int], label: str, seed: int = 0, noise: float = 0.0
) -> Sample:
    rng = np.random.default_rng(seed)
    row = example_row(size)
    layer_attentions = tuple(
        layer_attention(
            rng, layer, (size, size), heads=heads, kv_heads=heads, mask="window" if layer == layers - 1 else "causal",
            has_sink=layer == layers - 1, exact=exact if layer == 1 else (),
        )
        for layer in range(layers)
    )  # fmt: skip
    stack = StackAttention("decoder.self", "decoder", "decoder", layer_attentions)
    return Sample(
        label, {"decoder": row}, (stack,), COLUMNS, lens=example_lens(rng, row, layers), facts=(("step", str(seed)),)
    )


def translation_page() -> Page:
    """Two stacks with cross-attention, and the search tree that made the target."""
    rng = np.random.default_rng(1)
    source = token_row(["Monday", ",", " 5", " Jan", "uary", " 1998", "</s>"])
    target = token_row(["<s>", " Mon", "tag", ",", " der", " 5", ".", " Januar", " 1998"], generated=8)
    written = token_row([*target.texts[1:], "</s>"], generated=9)
    target = replace(target, writes=written.texts)
    kinds: list[tuple[Literal["encoder.self", "decoder.self", "decoder.memory"], Literal["full", "causal"]]] = [
        ("encoder.self", "full"), ("decoder.self", "causal"), ("decoder.memory", "full"),
    ]  # fmt: skip
    stacks = []
    for name, mask in kinds:
        queries: RowName = {"encoder.self": "encoder", "decoder.self": "decoder", "decoder.memory": "written"}[name]
        keys: RowName = "decoder" if name == "decoder.self" else "encoder"
        rows = {"encoder": source, "decoder": target, "written": written}
        size = (len(rows[queries].texts), len(rows[keys].texts))
        layers = tuple(
            layer_attention(rng, layer, size, heads=4, kv_heads=2, mask=mask, exact=(1,)) for layer in range(2)
        )
        stacks.append(StackAttention(name, queries, keys, layers))
    sample = Sample(
        "one pair", rows, tuple(stacks), COLUMNS,
        lens=example_lens(rng, target, 2), beams=example_beams(rng, target.texts[1:]),
    )  # fmt: skip
    return Page("a small translator", (sample,))


def example_lens(rng: np.random.Generator, row: TokenRow, layers: int) -> PageLens:
    """Predictions that come nearer to the next token from layer to layer."""
    vocabulary = (*dict.fromkeys([*row.texts, " a", " of", " in", " who"]),)
    size, top = len(row.texts), 5
    targets = np.array([vocabulary.index(text) for text in row.texts[1:]] + [-1])
    scores = rng.normal(size=(layers + 1, size, len(vocabulary)))
    for depth in range(layers + 1):
        scores[depth, np.arange(size - 1), targets[:-1]] += 6 * depth / layers * rng.uniform(size=size - 1)
    chances = softmax(scores, None)
    entries = np.argsort(-chances, axis=2)[:, :, :top]
    return PageLens(
        "decoder", ("embedding", *map(str, range(layers))), vocabulary, entries,
        np.take_along_axis(chances, entries, axis=2).astype(np.float32), targets,
        np.where(targets >= 0, chances[:, np.arange(size), targets], np.nan).astype(np.float32),
    )  # fmt: skip


def example_beams(rng: np.random.Generator, words: Sequence[str]) -> tuple[BeamNode, ...]:
    """A search with three beams that ends with the given words as the best result."""
    nodes = [BeamNode(-1, "<s>", 0.0, 0.0, 0, "kept")]
    beams, best = [0], 0
    for step, word in enumerate([*words, "</s>"], 1):
        candidates = []
        for parent in beams:
            for rank in range(3):
                text = word if parent == best and rank == 0 else str(rng.choice([" a", " the", " 5", " Jan", "uary"]))
                chance = float(np.log(0.8 if text == word else rng.uniform(0.02, 0.3)))
                candidates.append((nodes[parent].score + chance, parent, text, chance))
        candidates.sort(key=lambda item: -item[0])
        previous, beams = best, []
        for rank, (score, parent, text, chance) in enumerate(candidates):
            is_end = text == "</s>"
            state: Literal["kept", "pruned", "finished"] = (
                "finished" if is_end else "kept" if len(beams) < 3 else "pruned"
            )
            reason = {
                "finished": "end of sentence",
                "kept": "",
                "pruned": f"place {rank + 1} of {len(candidates)}, 3 are kept",
            }[state]
            nodes.append(BeamNode(parent, text, chance, score, step, state, reason, rank=0 if is_end else None))
            if state == "kept":
                beams.append(len(nodes) - 1)
            if parent == previous and text == word:
                best = len(nodes) - 1
    return tuple(nodes)


def timeline_page() -> Page:
    """The checkpoints of a run: heads that grow sharper."""
    samples = tuple(
        decoder_sample(13, layers=2, heads=3, exact=(0,), label=f"step {seed}00", seed=seed) for seed in range(3)
    )
    return Page("a run", samples, is_timeline=True)
