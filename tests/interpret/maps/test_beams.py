"""The beam-search tree of `model.attention`: its best path is the text that the decoder reads."""

from __future__ import annotations

import pytest

import clearhead as ch
from clearhead.core import build
from clearhead.interpret.view.explorer.data import BeamNode
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer


def model_of(family: str, kind: str) -> ch.Model:
    tokenizer = train_tokenizer("character", ["abcdefgh .,x_"], vocab_size=40)
    hparams = Hyperparameters(family=family, layers=1, width=14, heads=2, feedforward=17, tie="none")
    size = tokenizer.vocab_size
    module = build(build_spec(hparams, source_vocab=size, target_vocab=size)).eval()
    return ch.Model(module, TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind=kind))


def best_path(nodes: tuple[BeamNode, ...]) -> list[BeamNode]:
    """Return the nodes after the root on the path to the best result."""
    assert (nodes[0].parent, nodes[0].step, nodes[0].score) == (-1, 0, 0.0)
    assert all(node.parent >= 0 and node.step == nodes[node.parent].step + 1 for node in nodes[1:])
    (index,) = [number for number, node in enumerate(nodes) if node.rank == 0]
    path = []
    while index > 0:
        path.append(nodes[index])
        assert nodes[index].parent < index
        index = nodes[index].parent
    return path[::-1]


def test_the_best_path_is_the_translation() -> None:
    model = model_of("encoder-decoder", "translate")
    (best,) = model.translate_n_best("abc de", n=1, beam_size=3, max_length=7)
    maps = model.attention("abc de", generate=7, beam_size=3)
    path = best_path(maps.beams())
    assert [node.step for node in path] == list(range(1, len(path) + 1)) and maps.beams()[0].token == "<s>"
    assert "".join(node.token for node in path if node.token != "</s>").strip() == best.text.strip()
    assert path[-1].score == pytest.approx(best.score, abs=1e-5) and path[-1].state == "finished"
    assert sum(node.log_probability for node in path) == pytest.approx(best.log_probability, abs=1e-5)
    assert maps.inputs.labels == tuple(model.tokenizer.entries().index(token) for token in best.tokens)
    assert {node.state for node in maps.beams()} == {"kept", "pruned", "finished"}


def test_the_best_path_is_the_continuation() -> None:
    model = model_of("decoder", "generate")
    (best,) = model.generate("abc", max_new_tokens=5, beam_size=3)
    nodes = model.attention("abc", generate=5, beam_size=3).beams()
    assert nodes[0].token == "c", "the search starts behind the prompt"
    path = best_path(nodes)
    assert "".join(node.token for node in path if node.token != "</s>") == best.text
    assert path[-1].score == pytest.approx(best.score, abs=1e-5)


def test_without_beams_there_is_no_tree() -> None:
    assert model_of("decoder", "generate").attention("abc", generate=3).beams() == ()
    assert model_of("encoder-decoder", "translate").attention("abc", target="de").beams() == ()
