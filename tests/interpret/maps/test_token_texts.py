"""A token is written in one way: its text as it stands in a text, with signs for blanks."""

from __future__ import annotations

import json
import re

import pytest
import torch

from clearhead.base.figures import label_text
from clearhead.core import Sequence
from clearhead.interpret.maps.outcome import OutputNames, choose_outcome
from clearhead.interpret.maps.page import SampleOptions, run_sample, token_row
from clearhead.interpret.maps.streams import Streams
from clearhead.interpret.maps.token_texts import OTHER_BLANKS, SIGNS, label_tokens, read_token, token_texts
from clearhead.text.tokenizer_training import train_tokenizer
from tests.conftest import ROOT
from tests.interpret.maps.cases import make
from tests.interpret.maps.test_attention_maps import model_of

TEXT = "the dog sees the dog . the doggy"


SIZES = {"bpe": 25, "byte-bpe": 266, "wordpiece": 30, "word": 12, "character": 20, "split": 12}


@pytest.mark.parametrize("kind", SIZES)
def test_a_token_is_written_alike_wherever_it_stands(kind: str) -> None:
    tokenizer = train_tokenizer(kind, [TEXT] * 9, vocab_size=SIZES[kind])
    ids = [tokenizer.bos_id, *tokenizer.encode(TEXT), tokenizer.eos_id]
    written = label_tokens(tokenizer, ids)
    assert (written[0], written[-1]) == tuple(tokenizer.tokens([ids[0], ids[-1]]))
    assert written == [label_tokens(tokenizer, [index])[0] for index in ids]
    assert "".join(written[1:-1]).lstrip("␣") == TEXT.replace(" ", "␣")
    for token in written[1:-1]:
        assert label_tokens(tokenizer, [read_token(tokenizer, token)]) == [token]
    assert read_token(tokenizer, "never") is None


def test_parts_of_a_character_are_their_entries_and_the_last_has_it_whole() -> None:
    tokenizer = train_tokenizer("byte", ["a"], vocab_size=300)
    ids = tokenizer.encode("a é\n")
    *parts, last = tokenizer.tokens(ids)[2:4]
    assert token_texts(tokenizer, ids) == ["a", " ", *parts, "é", "\n"]
    assert label_tokens(tokenizer, ids) == ["a", "␣", *parts, "é", "↵"] and last != "é"


def test_the_page_has_the_same_signs() -> None:
    script = (ROOT / "clearhead" / "interpret" / "view" / "explorer" / "page" / "labels.js").read_text("utf-8")
    (table,) = re.findall(r"SIGNS = (\{.*?\});", script)
    assert json.loads(table) == SIGNS
    (blanks,) = re.findall(r"OTHER_BLANKS = /(.*?)/;", script)
    assert "".join(filter(re.compile(blanks).match, map(chr, range(0x3000)))) == OTHER_BLANKS


def test_no_blank_is_invisible_or_a_code_in_a_label() -> None:
    blanks = [
        chr(code) for code in range(0x10000) if chr(code).isspace() and chr(code) not in "\v\f\x85" and code >= 32
    ]
    tokenizer = train_tokenizer("character", ["".join(blanks) + "ab"], vocab_size=60)
    labels = label_tokens(tokenizer, [tokenizer.encode(f"a{blank}b")[1] for blank in blanks if blank != " "])
    for label in labels:
        assert label_text(label, longest=12) == label and label in SIGNS.values()


def test_the_page_writes_a_token_alike_in_every_view() -> None:
    tokenizer = train_tokenizer("bpe", [TEXT] * 9, vocab_size=25)
    maps = model_of(tokenizer, "decoder", "generate").attention(TEXT, generate=3, beam_size=2)
    index = 4
    outcome = maps.outcome(index)
    assert (outcome.position, outcome.token) == (index, maps.tokens[index])
    sample = run_sample(maps, "", SampleOptions(of=index))
    row = token_row(tokenizer, maps.inputs.source.ids[0].tolist(), None)
    assert sample.rows["decoder"].texts == row.texts
    written = row.texts[index].replace(" ", "␣")
    assert dict(sample.facts)["followed output"] == f"'{written}' at position {index}"
    assert any(f"logit of '{written}'" in column.description for column in sample.columns)
    assert sample.lens is not None and sample.lens.targets is not None
    followed = [sample.lens.vocabulary[entry] for entry in sample.lens.targets.tolist()]
    assert followed[:-1] == list(row.texts[1:])
    assert {node.token for node in sample.beams} <= {
        *sample.lens.vocabulary, *token_texts(tokenizer, range(tokenizer.vocab_size))
    }  # fmt: skip
    assert maps._labels("decoder.self")[1][index] == written


def test_an_outcome_is_chosen_as_it_is_written() -> None:
    tokenizer = train_tokenizer("word", ["a b c d"], vocab_size=23)
    streams = Streams.of(make("decoder, norms behind"), Sequence(torch.tensor([tokenizer.encode("a b c")])))
    names = OutputNames(tokenizer.entries(), tokenizer)
    (index,) = tokenizer.encode("d")
    assert names.display_name(index) == label_tokens(tokenizer, [index])[0]
    assert (
        choose_outcome(names.display_name(index), streams, names).id == choose_outcome("d", streams, names).id == index
    )
