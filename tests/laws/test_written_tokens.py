"""A row of cross-attention has one label everywhere: the token that the decoder writes at that step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import spec
from clearhead.apps.cli.main import main
from clearhead.core import build
from clearhead.interpret.explain.explanation import explain_text
from clearhead.interpret.explain.text import text_lines
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.page import explorer_page
from clearhead.model.facade import Model
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests.interpret.maps.planted import POSITIONS, SHARP, Blocks, attention_of
from tests.interpret.maps.test_attention_maps import model_of
from tests.interpret.view.explorer.browser import Tab, browser

SOURCE, WRITTEN = "null eins zwei drei vier", "zero one two three four"
HEAD = 1
"""Looks from the step that writes a word to the word that it translates, which stands at the mirrored place."""


@pytest.fixture(scope="module")
def model() -> Model:
    """A model that writes one sentence word by word, whatever it reads, and looks at the mirror image meanwhile."""
    words = WRITTEN.split()
    tokenizer = train_tokenizer("word", [f"{SOURCE} {WRITTEN}"], vocab_size=20)
    blocks = Blocks(tokenizer.vocab_size)
    decoder = blocks.stack(spec.Causal(), "self", "memory", layers=1)
    head = spec.Head(layers=(spec.Linear(size=tokenizer.vocab_size, bias=False),))
    encoder = blocks.stack(spec.Full(), "self", layers=1)
    with torch.no_grad():
        module = build(spec.Model(encoder=encoder, decoder=decoder, head=head)).eval()
        blocks.embed(module)
        sentence = [tokenizer.bos_id, *tokenizer.encode(WRITTEN), tokenizer.eos_id]
        projection = module.head.projection().weight_VD
        for read, written in pairwise(sentence):
            projection[written, read] = SHARP
        query, key = blocks.head(attention_of(module, "decoder.layers.0.steps.1"), HEAD)
        query[blocks.head_position, blocks.position] = SHARP * torch.eye(POSITIONS)
        key[blocks.head_position, blocks.position] = torch.eye(POSITIONS).flip(0).roll(len(words), 0)
    return Model(module, TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind="translate"))


@pytest.fixture(scope="module")
def maps(model: Model) -> AttentionMaps:
    return model.attention(SOURCE)


@pytest.fixture(scope="module")
def running(chromium: str) -> Iterator[Any]:
    with browser(chromium) as chrome:
        yield chrome


@pytest.fixture(scope="module")
def tab(running: Any, maps: AttentionMaps, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, explorer_page("a page", [("", maps)]), tmp_path_factory.mktemp("page"))


def plain(tokens: Any) -> list[str]:
    """Tokens or labels without their signs for blanks."""
    return [token.strip("▁␣ ") for token in tokens]


def pairs_of(maps: AttentionMaps) -> dict[str, str]:
    """Each row's token with the token that the planted head looks at, by the maps."""
    best = maps.weights("decoder.memory", 0, HEAD).argmax(1).tolist()
    keys = plain(maps.key_tokens("decoder.memory"))
    return {query: keys[key] for query, key in zip(plain(maps.query_tokens("decoder.memory")), best, strict=True)}


def links_of(pairs: dict[str, str]) -> str:
    """The links between words that pairs of tokens make, as `--alignments` writes them."""
    source, target = SOURCE.split(), WRITTEN.split()
    return " ".join(sorted(f"{source.index(pairs[word])}-{index}" for index, word in enumerate(target)))


def test_maps_page_picture_table_and_alignments_agree(
    model: Model, maps: AttentionMaps, tab: Tab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert plain(maps.written_tokens) == [*WRITTEN.split(), "</s>"]
    assert maps.query_tokens("decoder.memory") == maps.written_tokens
    pairs = pairs_of(maps)
    assert {word: pairs[word] for word in WRITTEN.split()} == dict(
        zip(WRITTEN.split(), reversed(SOURCE.split()), strict=True)
    )

    shown = tab.go(f"view=alignment&average=head&layer=0&head={HEAD}").locator(".panel tbody tr")
    cells = [shown.nth(row).locator("td").all_inner_texts() for row in range(shown.count())]
    assert {target: source for target, source, _ in map(plain, cells)} == pairs

    maps.save_picture(tmp_path / "head.svg", stack="decoder.memory", layer=0, head=HEAD)
    drawn = re.findall(r"<!-- (.*?) -->", (tmp_path / "head.svg").read_text("utf-8"))
    labels = plain(text.replace("&lt;", "<").replace("&gt;", ">") for text in drawn)
    columns, rows = [index for index, text in enumerate(labels) if text == "</s>"][:2]
    assert labels[columns - 5 : columns] == SOURCE.split() and labels[rows - 5 : rows] == WRITTEN.split()
    assert any("row = token being written" in text for text in drawn)

    model.save(tmp_path / "saved")
    (tmp_path / "source.txt").write_text(f"{SOURCE}\n", encoding="utf-8")
    options = ["--alignment-heads", f"0.{HEAD}", "--beam-size", "1"]
    assert main(["translate", str(tmp_path / "saved"), str(tmp_path / "source.txt"), *options]) == 0
    text, _, links = capfd.readouterr().out.strip().partition(" ||| ")
    assert text == WRITTEN and " ".join(sorted(links.split())) == links_of(pairs)


@pytest.mark.parametrize("step", range(5))
def test_an_explanation_names_the_token_that_is_written(maps: AttentionMaps, step: int) -> None:
    lines = "\n".join(text_lines(explain_text(maps, "title", head=HEAD, token=step)))
    query, key = WRITTEN.split()[step], SOURCE.split()[4 - step]
    assert re.search(rf"why {step} ␣?{query} looks at {4 - step} ␣?{key}, its largest\s+weight", lines)
    assert re.search(rf"token {step} \S+; this step writes {step} ␣?{query}\n", lines)


def test_rows_of_self_attention_keep_the_tokens_read_and_say_what_they_write(maps: AttentionMaps, tab: Tab) -> None:
    assert maps.query_tokens("decoder.self") == maps.key_tokens("decoder.self") == maps.target_tokens
    assert plain(maps.target_tokens) == ["<s>", *WRITTEN.split()]
    panel = tab.go("view=matrix&stack=decoder.self&query=2&key=1").locator(".panel h4").inner_text()
    assert re.fullmatch(r"Position 2: “␣?one” attends to\s*▸ ␣?two", panel.strip())
    items = tab.go("view=lines&stack=decoder.self").locator(".line-tokens.left li").all_inner_texts()
    written = [re.sub(r"[\s␣]*▸[\s␣]*", " ▸ ", item).strip("␣ ") for item in items]
    pairs = zip(plain(maps.target_tokens), plain(maps.written_tokens), strict=True)
    assert written == [f"{read} ▸ {writes}" for read, writes in pairs]
    assert "▸" not in "".join(tab.go("view=lines&stack=decoder.memory").locator("#main").all_inner_texts())
    assert "After ▸ is the token that the model writes next." in tab.go("view=matrix&stack=decoder.self").inner_text(
        ".words"
    )


def test_the_last_token_of_a_given_target_is_the_most_probable_next_one(model: Model, maps: AttentionMaps) -> None:
    maps_of_target = model.attention(SOURCE, "zero one")
    assert plain(maps_of_target.written_tokens) == ["zero", "one", "two"], (
        "the model would go on, whatever the target says"
    )
    assert maps_of_target.inputs.labels[-1] == model.tokenizer.eos_id, "a target is still scored with its end token"
    assert model.attention(SOURCE, WRITTEN).written_tokens == maps.written_tokens
    end = maps_of_target.lens(1).ids[-1, -1, 0]
    assert plain(model.tokenizer.tokens([int(end)])) == ["two"]
    weights = maps_of_target.weights("decoder.memory", 0, HEAD)
    torch.testing.assert_close(weights, maps.weights("decoder.memory", 0, HEAD)[:3], atol=1e-6, rtol=0)


def test_a_changed_model_may_predict_another_last_token(model: Model) -> None:
    def read_three(hidden_BTD: torch.Tensor) -> torch.Tensor:
        changed = torch.zeros_like(hidden_BTD)
        changed[..., model.tokenizer.encode("three")[0]] = 1.0
        return changed

    with model.edit({"hidden": read_three}):
        edited = model.attention(SOURCE, "zero one")
    assert plain(edited.written_tokens) == ["zero", "one", "four"], "also after the edit has ended"
    assert plain(model.attention(SOURCE, "zero one").written_tokens) == ["zero", "one", "two"]


def test_a_decoder_alone_writes_the_next_token_of_its_text() -> None:
    tokenizer = train_tokenizer("character", ["abcdefgh .,x_"], vocab_size=40)
    model = model_of(tokenizer, "decoder", "generate")
    alone, longer = model.attention("abc"), model.attention("abc", generate=4)
    for maps in (alone, longer):
        assert maps.written_tokens is not None and len(maps.written_tokens) == len(maps.tokens)
        assert maps.written_tokens[:-1] == maps.tokens[1:]
    assert alone.written_tokens[-1] == longer.tokens[len(alone.tokens)], "greedy"


@pytest.mark.parametrize(("family", "kind"), [("encoder", "fill"), ("encoder", "classify")])
def test_a_model_that_writes_no_text_has_no_written_tokens(family: str, kind: str) -> None:
    tokenizer = train_tokenizer("character", ["abcdefgh .,x_"], vocab_size=40, mask=True)
    maps = model_of(tokenizer, family, kind).attention("abc")
    assert maps.written_tokens is None and "written_tokens" in maps.to_json()


def test_files_and_json_hold_written_tokens_and_old_files_number_the_steps(maps: AttentionMaps, tmp_path: Path) -> None:
    path = tmp_path / "maps.npz"
    maps.save(path)
    arrays = dict(np.load(path))
    assert arrays["written_tokens"].tolist() == maps.to_json()["written_tokens"] == maps.written_tokens

    def labels(stack: str) -> tuple[str, ...]:
        (sample,) = ch.view_attention(path)._page.samples
        (shown,) = (attention for attention in sample.attentions if attention.stack == stack)
        return sample.rows[shown.queries].texts

    assert list(labels("decoder.memory")) == maps.written_tokens
    assert list(labels("decoder.self")) == maps.target_tokens
    del arrays["written_tokens"]
    np.savez(path, **{**arrays, "format": 1})
    assert labels("decoder.memory") == tuple(f"step {number}" for number in range(6))
    assert list(labels("decoder.self")) == maps.target_tokens
    arrays["written_tokens"] = np.array(["one", "less"])
    np.savez(path, **arrays)
    with pytest.raises(ch.InputError, match="2 written tokens for 6 steps"):
        ch.view_attention(path)


def test_checkpoints_that_predict_another_last_token_can_be_compared(
    running: Any, model: Model, tmp_path: Path
) -> None:
    maps_of_target = model.attention(SOURCE, "zero one")
    other = maps_of_target.with_module(build(model.spec).eval())
    other.next_id = model.tokenizer.encode("eins")[0]
    tab = Tab(running, explorer_page("two", [("first", maps_of_target), ("second", other)]), tmp_path)
    assert tab.go("view=matrix&other=1&difference=1").locator("section.pane").count() == 3
