"""The law of a schema: an ended text is JSON under it, and a cut-off text is the start of such a text."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import jsonschema
import llguidance
import pytest
import torch

from clearhead import core as ch
from clearhead.base.errors import InputError, RunFailure
from clearhead.generate import json_schema, schema_worker
from clearhead.generate.continuation import GenerateRequest, RequestStarter
from clearhead.generate.json_schema import with_schema
from clearhead.generate.options import GenerateOptions
from clearhead.generate.running import RunningBatch
from clearhead.generate.search import sampling
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.generate.test_decoder import decoder_of, model_of

CASES = int(os.environ.get("CLEARHEAD_CASES", "40"))
SCHEMAS = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["é", "größer", "😀", None]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "object"},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2}]},
    {"type": "string", "pattern": "^[a-c]{2,5}é$"},
    {"const": {"a": [1, "b"]}},
)
WRITTEN = [json.dumps({"name": "größer 😀", "age": 12, "tags": ["é", None, True]}, ensure_ascii=False)]
WRITTEN += ['[ 0.5e-3 , -2 ] { "a" : [ 1 , "b" ] } false', "abc é 3 4 5 6 7 8 9"]
KINDS = ("byte-bpe", "byte", "character", "word", "bpe", "unigram", "wordpiece", "split")


def tokenizer_of(kind: str) -> Tokenizer:
    size = {"byte": 260, "byte-bpe": 300, "bpe": 80, "unigram": 44, "wordpiece": 90}.get(kind, 70)
    return train_tokenizer(kind, WRITTEN * 3, vocab_size=size)


def build_untrained(tokenizer: Tokenizer) -> ch.Transformer:
    """Return a model that sometimes generates the end token, so that texts end."""
    module = model_of("decoder", tokenizer.vocab_size, extra=3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.div_(10.0)
        module.head.layers[-1].bias[tokenizer.encode('"]}')] += 2.0
    return module


@pytest.fixture(scope="module")
def bytewise() -> llguidance.LLTokenizer:
    """Return a vocabulary of 256 bytes and an end token, without clearhead's special tokens."""

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
        tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_ends_is_valid_and_a_cut_one_begins_a_valid_text(
    kind: str, bytewise: llguidance.LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, masked = tokenizer_of(kind), []
    plain = sampling.TokenChooser._mask_disallowed
    monkeypatch.setattr(
        sampling.TokenChooser, "_mask_disallowed", lambda *arguments: masked.append(1) or plain(*arguments)
    )
    module, ended, cut = build_untrained(tokenizer), 0, 0
    # Needed if all words begin with a space.
    spaces = {"x-guidance": {"whitespace_flexible": True}} if kind in ("word", "split") else {}
    for number, schema in enumerate({**schema, **spaces} for schema in SCHEMAS):
        for options in (
            GenerateOptions(max_new_tokens=50, temperature=1.0, seed=number, num_return_sequences=max(CASES // 40, 1)),
            GenerateOptions(max_new_tokens=7, top_k=9, seed=5, stop=["g", "]"], min_new_tokens=6),
            GenerateOptions(max_new_tokens=40, temperature=0),
        ):
            try:
                actual = decoder_of(module, tokenizer).generate(["a", "", "12"], options, schema)
            except (InputError, RunFailure) as error:
                assert "schema" in str(error) and kind in ("word", "split", "wordpiece", "unigram", "bpe")
                continue
            for result in (result for some in actual for result in some):
                if result.stop_reason == "end":
                    jsonschema.validate(json.loads(result.text), schema)
                    ended += 1
                else:
                    assert result.stop_reason == "length"
                    written = result.text.lstrip(" ").encode()
                    assert llguidance.LLMatcher(bytewise, json.dumps(_grammar(schema))).validate_tokens(
                        list(written)
                    ) == len(written), (result.text, schema)
                    cut += 1
    assert masked and ended and cut
    print(kind, ended, cut)


@pytest.mark.parametrize("kind", ["byte", "byte-bpe"])
def test_no_white_space_stands_between_the_parts_of_a_text(kind: str) -> None:
    """Even for a model that gives only white space a high logit."""
    tokenizer = tokenizer_of(kind)
    module = build_untrained(tokenizer)
    with torch.no_grad():
        for space in (" ", "\n", "\t"):
            module.head.layers[-1].bias[tokenizer.encode(space)] += 9.0
    for schema in SCHEMAS[:3]:
        for options in (GenerateOptions(max_new_tokens=90, temperature=1.0, seed=3), GenerateOptions(temperature=0)):
            ((generation,),) = decoder_of(module, tokenizer).generate(["a"], options, schema)
            outside = re.sub(r'"(?:[^"\\]|\\.)*("|$)', "", generation.text.removeprefix(" "))
            assert outside and not re.search(r"\s", outside), generation.text


def _grammar(schema: dict) -> dict:
    return {"grammars": [{"json_schema": schema}]}


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"not": {}}, "Unimplemented keys"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "strin"}, "Invalid type"),
        ({"const": object()}, "not JSON"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_one_sentence(schema: dict, sentence: str) -> None:
    tokenizer = tokenizer_of("byte")
    request = GenerateRequest([[2]], GenerateOptions(), eos_id=3, pad_id=0)
    with pytest.raises(InputError, match=sentence) as caught:
        with_schema(request, schema, tokenizer, tokenizer.vocab_size)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_without_braces_is_refused_before_anything_is_generated() -> None:
    tokenizer = train_tokenizer("unigram", ['"a" "b" abc 3 4 5'] * 9, vocab_size=12)
    request = GenerateRequest([[2]], GenerateOptions(), eos_id=3, pad_id=0)
    with pytest.raises(InputError, match=r"no token of this vocabulary \(unigram\) can begin a text under the schema"):
        with_schema(request, {"type": "object"}, tokenizer, tokenizer.vocab_size)
    assert with_schema(request, {"type": "string"}, tokenizer, tokenizer.vocab_size).constraint is not None


HOSTILE = (
    {"type": "string", "allOf": [{"pattern": f".*{number}.*"} for number in range(60)]},
    {"type": "integer", "multipleOf": 10_000_019},
)


@pytest.mark.parametrize("schema", HOSTILE)
def test_a_schema_that_needs_too_much_is_refused_and_the_next_one_is_not(
    schema: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of("byte")
    request = GenerateRequest([[2]], GenerateOptions(), eos_id=3, pad_id=0)
    with monkeypatch.context() as patch:
        patch.setattr(json_schema, "SECONDS", 0.3)
        with pytest.raises(InputError, match=r"JSON schema (took more than 0\.3 seconds|needs more than the 512 MB)"):
            with_schema(request, schema, tokenizer, tokenizer.vocab_size)
    assert with_schema(request, SCHEMAS[0], tokenizer, tokenizer.vocab_size).constraint is not None
    assert json_schema._children().qsize() == json_schema.MOST_AT_ONCE


def test_a_schema_that_is_abandoned_ends() -> None:
    tokenizer, abandoned = tokenizer_of("byte"), threading.Event()
    request = GenerateRequest([[2]], GenerateOptions(), eos_id=3, pad_id=0)
    threading.Timer(0.5, abandoned.set).start()
    with pytest.raises(InputError, match="was given up"):
        with_schema(request, HOSTILE[1], tokenizer, tokenizer.vocab_size, abandoned)


@pytest.mark.parametrize("schema", [{"type": "string", "minLength": 500, "maxLength": 5000}, {"enum": ["a" * 200_000]}])
def test_a_text_that_exceeds_the_limits_of_llguidance_names_the_reason(
    schema: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_worker, "MOST_STATES", 60)
    tokenizer = tokenizer_of("byte")
    module, options = build_untrained(tokenizer), GenerateOptions(max_new_tokens=200, temperature=0)
    with pytest.raises(InputError, match="the JSON schema cannot be followed: lexer error: too many"):
        decoder_of(module, tokenizer).generate(["a"], options, schema)


def test_search_and_files_that_hold_no_object_are_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte")
    beams = GenerateRequest([[2]], GenerateOptions(beam_size=2), eos_id=3, pad_id=0)
    with pytest.raises(InputError, match="ask for beam search"):
        with_schema(beams, {}, tokenizer, tokenizer.vocab_size)
    (tmp_path / "schema.json").write_text("[")
    with pytest.raises(InputError, match=r"schema\.json"):
        with_schema(beams_off(beams), tmp_path / "schema.json", tokenizer, tokenizer.vocab_size)


def beams_off(request: GenerateRequest) -> GenerateRequest:
    return replace(request, options=GenerateOptions())


def test_a_schema_belongs_to_its_request_alone() -> None:
    """Requests with and without a schema share a batch, and each gets the tokens that it gets alone."""
    tokenizer = tokenizer_of("byte")
    module, options = build_untrained(tokenizer), GenerateOptions(max_new_tokens=12, temperature=1.0, seed=4)
    free = GenerateRequest([[2, 40, 50]], options, eos_id=3, pad_id=0, decode=tokenizer.decode)
    held = [with_schema(free, schema, tokenizer, tokenizer.vocab_size + 3) for schema in SCHEMAS[:3]]

    def tokens(requests: list[GenerateRequest]) -> list[list[int]]:
        batch, members = RunningBatch(module), []
        with torch.inference_mode():
            members = [RequestStarter(module, request, [12], with_text=True).start([0]) for request in requests]
            rows = [row for start in members for row in start.member.sequences]
            batch.join(members)
            while batch.members:
                batch.step()
        return [row.ids for row in rows]

    together = tokens([held[0], free, *held[1:]])
    assert together == [ids for request in (held[0], free, *held[1:]) for ids in tokens([request])]
    assert len({tuple(ids) for ids in together}) == 4
