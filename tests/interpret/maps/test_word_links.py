"""Word alignments follow the attention heads: planted heads, manual computation, and all forms of tokens."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core import build
from clearhead.generate.results import Hypothesis
from clearhead.interpret.maps.word_links import WordAligner, written_words
from clearhead.model.facade import Model
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests.interpret.maps.planted import POSITIONS, SHARP, Blocks, attention_of, vocabulary


def model_of(module: ch.Transformer) -> Model:
    tokenizer = vocabulary()
    return Model(module, TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind="translate"))


def hypothesis(model: Model, text: str) -> Hypothesis:
    ids = (*model.tokenizer.encode(text), model.tokenizer.eos_id)
    return Hypothesis(text, model.tokenizer.tokens(ids), 0.0, 0.0, ids)


def links(aligner: WordAligner, texts: list[str], targets: list[Hypothesis]) -> list[str | None]:
    return [hypotheses[0].alignment for hypotheses in aligner.add_to(texts, [[target] for target in targets])]


@torch.no_grad()
def reversing(length: int) -> Model:
    """A model whose head 1 of layer 0 looks from each letter that is written to its mirror image in the text.

    In layer 1, the last one, head 0 looks there too, but the two others look at the first letter.
    """
    blocks = Blocks(vocabulary().vocab_size)
    decoder = blocks.stack(spec.Causal(), "self", "memory", layers=2)
    module = build(spec.Model(encoder=blocks.stack(spec.Full(), "self", layers=1), decoder=decoder)).eval()
    blocks.embed(module)
    first, last = (attention_of(module, f"decoder.layers.{layer}.steps.1") for layer in (0, 1))
    for attention, head in ((first, 1), (last, 0)):
        query, key = blocks.head(attention, head)
        query[blocks.head_position, blocks.position] = SHARP * torch.eye(POSITIONS)
        key[blocks.head_position, blocks.position] = torch.eye(POSITIONS).flip(0).roll(length, 0)
    for head in (1, 2):
        blocks.look_at_first(last, head)
    return model_of(module)


def test_the_heads_that_align_best_know_what_the_mean_of_the_last_layer_does_not() -> None:
    texts = ["ab cde fg h", "a bcd ef gh", "abc d e fgh"]
    model = reversing(len(texts[0]))
    targets = [hypothesis(model, text[::-1]) for text in texts]
    known = ["0-3 1-2 2-1 3-0"] * 3
    aligner = model.word_aligner()
    assert links(aligner, texts, targets) == known
    assert aligner.heads is not None and set(aligner.heads) == {(0, 1), (1, 0)}
    others = links(model.word_aligner([(1, 0), (1, 1), (1, 2)]), texts, targets)
    right = [len({*aligned.split()} & {*two.split()}) for aligned, two in zip(map(str, others), known, strict=True)]
    assert sum(right) / 12 < 0.5


def build_untrained() -> Model:
    torch.manual_seed(7)
    size = vocabulary().vocab_size
    hparams = Hyperparameters("encoder-decoder", layers=2, width=14, heads=2, feedforward=17, tie="none")
    module = ch.build(build_spec(hparams, source_vocab=size, target_vocab=size)).eval()
    for parameter in module.parameters():
        parameter.requires_grad_(requires_grad=False).mul_(3)
    return model_of(module)


def test_links_are_those_of_the_weights_that_maps_show() -> None:
    model = build_untrained()
    texts, targets = ["ab cde f", "zz y", " "], ["gh i jk lm", "o p", ""]
    alignments = links(model.word_aligner([(0, 1), (1, 0)]), texts, [hypothesis(model, line) for line in targets])
    for text, target, written in zip(texts[:2], targets, alignments, strict=False):
        maps = model.attention(text, target)
        weights = maps.weights("decoder.memory", 0, 1) + maps.weights("decoder.memory", 1, 0)
        words = [[index for index, sign in enumerate(line) if line[: index + 1].count(" ") == number and sign != " "]
                 for line in (text, target) for number in range(line.count(" ") + 1)]  # fmt: skip
        rows, columns = words[text.count(" ") + 1 :], words[: text.count(" ") + 1]
        # A space belongs to the next word.
        rows = [[*([row[0] - 1] if row[0] else []), *row] for row in rows]
        columns = [[*([column[0] - 1] if column[0] else []), *column] for column in columns]
        sums = [[float(weights[row][:, column].sum()) / len(row) for column in columns] for row in rows]
        best = {
            (s, t)
            for t, row in enumerate(sums)
            for s, value in enumerate(row)
            if value == max(row) and value == max(other[s] for other in sums)
        }
        assert written == " ".join(f"{s}-{t}" for s, t in sorted(best))
    assert alignments[2] == ""


@pytest.mark.parametrize(
    ("kind", "size"),
    [("character", 60), ("bpe", 27), ("byte-bpe", 265), ("wordpiece", 40), ("unigram", 24), ("word", 60)],
)
def test_the_words_of_what_was_written_are_those_of_its_text(kind: str, size: int) -> None:
    text = "der große hund läuft über grünes gras"
    tokenizer = train_tokenizer(kind, [text, "das haus"], vocab_size=size)
    ids, words = tokenizer.words(text)
    assert tokenizer.decode(ids) == text
    numbers = written_words(tokenizer, [*ids, tokenizer.eos_id])
    assert numbers[-1] == -1 and max(numbers) == 6
    assert [number for number in numbers[:-1] if number >= 0] == [
        word for number, word in zip(numbers, words.tolist(), strict=False) if number >= 0
    ]


def test_segments_of_a_word_are_one_word() -> None:
    tokenizer = train_tokenizer("split", ["ein klein@@ er hund"], vocab_size=20)
    assert written_words(tokenizer, tokenizer.encode("ein klein@@ er hund")) == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([], "the list of heads for alignments is empty"),
        ([(2, 0)], "the cross-attention has no layer 2; it has 0 to 1"),
        ([(0, 0), (1, 3)], "layer 1 of the cross-attention has no head 3; it has 0 to 2"),
    ],
)
def test_heads_that_do_not_exist_are_refused(heads: list[tuple[int, int]], message: str) -> None:
    model = reversing(5)
    with pytest.raises(InputError, match=message):
        model.translate_n_best("ab", alignments=heads)


def test_a_model_without_attention_to_a_source_aligns_nothing() -> None:
    size = vocabulary().vocab_size
    hparams = Hyperparameters("decoder", layers=1, width=14, heads=2, feedforward=17)
    model = model_of(ch.build(build_spec(hparams, source_vocab=size, target_vocab=size)))
    with pytest.raises(InputError, match="translation needs a model with encoder and decoder"):
        model.translate_n_best("ab", n=1, alignments=True)


def test_every_hypothesis_of_every_way_to_ask_is_aligned() -> None:
    model = build_untrained()
    texts = ["ab cd", "", "c d e"]
    options = {"n": 2, "beam_size": 2, "max_length": 6}
    hypotheses = model.translate_n_best(texts, alignments=[(0, 1)], **options)
    assert [*model.translate_n_best(iter(texts), alignments=[(0, 1)], **options)] == hypotheses
    assert [model.translate_n_best(text, alignments=[(0, 1)], **options) for text in texts] == hypotheses
    assert all(result.alignment is not None for row in hypotheses for result in row)
    assert all(result.alignment is None for result in model.translate_n_best("ab", **options))
