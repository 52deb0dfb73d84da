"""Vectors of texts: the same for any batch, in the order of the texts, of length 1, and their cosines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clearhead.base.errors import InputError, LongTexts, RunFailure
from clearhead.core import Transformer, build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.task_heads import label_head, vector_head, with_head
from clearhead.tasks.embed.use import embed, similarity, vector_width
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

WIDTH = 14
TEXTS = ["aa bb cc dd ee ff gg", "hh", "", "aa bb cc", "gg hh aa bb cc dd ee ff gg hh aa", "dd ee", "bb"]
MODELS = [("encoder", "mean"), ("encoder", "first"), ("decoder", "last"), ("encoder-decoder", "last")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("word", ["aa bb cc dd ee ff gg hh"], vocab_size=100)


def model(
    tokenizer: Tokenizer, family: str = "encoder", pool: str = "mean", positions: str = "rotary", segments: int = 0
) -> Transformer:
    sizes = {"layers": 2, "width": WIDTH, "heads": 7, "feedforward": 11, "max_positions": 13}
    hparams = Hyperparameters(family=family, positions=positions, segments=segments, **sizes)  # type: ignore[arg-type]
    base = build_spec(hparams, source_vocab=tokenizer.vocab_size, target_vocab=tokenizer.vocab_size)
    torch.manual_seed(3)
    return build(with_head(base, vector_head(pool=pool)))  # type: ignore[arg-type]


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("family", "pool"), MODELS)
def test_a_vector_depends_on_its_text_alone(tokenizer: Tokenizer, family: str, pool: str) -> None:
    module = model(tokenizer, family, pool)
    together = embed(module, tokenizer, TEXTS)
    assert together.dtype == np.float32 and together.shape == (len(TEXTS), WIDTH)
    alone = np.concatenate([embed(module, tokenizer, [text]) for text in TEXTS])
    assert_close(together, alone)
    assert_close(embed(module, tokenizer, TEXTS, batch_tokens=1), alone)
    assert_close(embed(module, tokenizer, TEXTS[::-1])[::-1], alone)
    assert len(np.unique(alone.round(4), axis=0)) == len(TEXTS), "different texts have different vectors here"


@pytest.mark.parametrize(("family", "pool"), MODELS)
def test_every_vector_has_length_one(tokenizer: Tokenizer, family: str, pool: str) -> None:
    vectors = embed(model(tokenizer, family, pool), tokenizer, TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize(("family", "pool"), MODELS)
def test_padding_on_either_side_changes_nothing(tokenizer: Tokenizer, family: str, pool: str) -> None:
    module = model(tokenizer, family, pool).eval()
    framed = [tokenizer.bos_id, *tokenizer.encode("aa bb cc"), tokenizer.eos_id]
    pads = [tokenizer.pad_id] * 3
    start = torch.tensor([[tokenizer.bos_id]]) if family == "encoder-decoder" else None
    with torch.inference_mode():
        plain, right, left = (
            module(torch.tensor([ids]), start, mask=torch.tensor([mask])).logits
            for ids, mask in (
                (framed, [True] * 5),
                ([*framed, *pads], [True] * 5 + [False] * 3),
                ([*pads, *framed], [False] * 3 + [True] * 5),
            )
        )
    torch.testing.assert_close(right, plain)
    torch.testing.assert_close(left, plain)
    assert_close(embed(module, tokenizer, ["aa bb cc"]), plain.numpy())


def test_the_vector_is_the_pooled_state(tokenizer: Tokenizer) -> None:
    """Worked out from the last states, without the head."""
    ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode("aa bb cc"), tokenizer.eos_id]])
    for pool in ("mean", "first", "last"):
        module = model(tokenizer, pool=pool).eval()
        with torch.inference_mode():
            hidden = module(ids).hidden[0].numpy()
        state = {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pool]
        assert_close(embed(module, tokenizer, ["aa bb cc"])[0], state / np.linalg.norm(state))


def test_an_empty_text_is_its_start_and_end(tokenizer: Tokenizer) -> None:
    module = model(tokenizer)
    ids = torch.tensor([[tokenizer.bos_id, tokenizer.eos_id]])
    with torch.inference_mode():
        expected = module.eval()(ids).logits.numpy()
    assert_close(embed(module, tokenizer, [""]), expected)


def test_a_pair_is_read_as_one_sequence(tokenizer: Tokenizer) -> None:
    module = model(tokenizer, segments=2)
    pairs = [("aa bb", "cc"), ("dd", ""), ("aa", "bb cc")]
    vectors = embed(module, tokenizer, pairs)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    for vector, (first, second) in zip(vectors, pairs, strict=True):
        first_ids, second_ids = [bos, *tokenizer.encode(first), eos], [*tokenizer.encode(second), eos]
        segments = torch.tensor([[0] * len(first_ids) + [1] * len(second_ids)])
        with torch.inference_mode():
            expected = module.eval()(torch.tensor([first_ids + second_ids]), segments=segments).logits[0].numpy()
        assert_close(vector, expected)
    assert np.abs(vectors[0] - vectors[2]).max() > 1e-3
    with pytest.raises(InputError, match="got 1 texts among 2 pairs"):
        embed(module, tokenizer, [("aa", "bb"), "cc", ("dd", "ee")])


def test_the_module_keeps_its_mode_and_dropout_is_off(tokenizer: Tokenizer) -> None:
    module = model(tokenizer).train()
    first, second = embed(module, tokenizer, TEXTS), embed(module, tokenizer, TEXTS)
    assert module.training
    np.testing.assert_array_equal(first, second)


def test_no_text_gives_no_vector(tokenizer: Tokenizer) -> None:
    assert embed(model(tokenizer), tokenizer, []).shape == (0, WIDTH)


def test_the_width_is_that_of_the_last_map(tokenizer: Tokenizer) -> None:
    base = model(tokenizer).spec
    module = build(with_head(base, label_head(WIDTH, 3, pool="mean")))
    assert vector_width(module) == 3
    assert embed(module, tokenizer, TEXTS).shape == (len(TEXTS), 3)


def test_what_cannot_be_embedded_is_said(tokenizer: Tokenizer) -> None:
    words = build(
        build_spec(Hyperparameters(family="encoder", layers=1, width=WIDTH, heads=7), source_vocab=17, target_vocab=17)
    )
    with pytest.raises(InputError, match=r'head pools .* train one with .task. kind = "embed"'):
        embed(words, tokenizer, TEXTS)


def test_a_long_text_is_read_as_its_front(tokenizer: Tokenizer) -> None:
    module = model(tokenizer, positions="learned")
    with pytest.warns(LongTexts, match="2 texts are longer than the 13 tokens"):
        vectors = embed(module, tokenizer, ["aa " * 12, "aa", "aa " * 10**6])
    fronts = embed(module, tokenizer, [("aa " * 11).strip(), "aa"])
    assert vectors == pytest.approx(fronts[[0, 1, 0]], abs=1e-5)


def test_broken_weights_are_said(tokenizer: Tokenizer) -> None:
    module = model(tokenizer)
    with torch.no_grad():
        module.encoder.embedding.rows.weight[tokenizer.encode("hh")[0]] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(RunFailure, match="the vector of text 2 is not finite, nor are 1 others"):
        embed(module, tokenizer, TEXTS)


def test_similarity_is_the_cosine(tokenizer: Tokenizer) -> None:
    module = model(tokenizer)
    vectors = embed(module, tokenizer, TEXTS)
    cosines = similarity(module, tokenizer, TEXTS, TEXTS[::-1])
    assert cosines.shape == (len(TEXTS),)
    assert_close(cosines, np.array([left @ right for left, right in zip(vectors, vectors[::-1], strict=True)]))
    np.testing.assert_allclose(similarity(module, tokenizer, TEXTS, TEXTS), 1.0, atol=1e-6)
    assert similarity(module, tokenizer, TEXTS, TEXTS).max() <= 1.0
    with pytest.raises(InputError, match="7 first texts but 6 second texts"):
        similarity(module, tokenizer, TEXTS, TEXTS[1:])
