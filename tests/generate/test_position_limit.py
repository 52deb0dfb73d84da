"""Prompts and answers beyond the positions of a model: learned tables and declared lengths follow one rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead import spec
from clearhead.apps.cli.main import main
from clearhead.base.errors import ContextTooLong, InputError, LongTexts
from clearhead.generate.continuation import generate_ids
from clearhead.model.facade import make_writer
from tests.hf_models import language_model, rotary_model, translator

PROMPT = "a m u"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ch.Model]:
    """A model with a table of 61 positions, and one that computes them and declares 61."""
    folder = tmp_path_factory.mktemp("limits")
    makers = {"table": language_model, "declared": rotary_model}
    return {name: ch.load(make(folder / name), precision="fp32") for name, make in makers.items()}


def texts(model: ch.Model, count: int) -> str:
    """A text of so many tokens."""
    text = "".join("am"[number % 2] for number in range(3 * count))
    length = next(length for length in range(len(text)) if len(model.tokenizer.encode(text[:length])) == count)
    return text[:length]


def count_written(model: ch.Model, prompt: str, **options: Any) -> int:
    """The number of tokens that greedy search writes, end tokens banned."""
    ((only,), *_) = [model.generate(prompt, temperature=0, **options)]
    return len(only.tokens)


@pytest.mark.parametrize("kind", ["table", "declared"])
def test_what_a_call_asks_for_must_fit_into_the_positions(kind: str, models: dict[str, ch.Model]) -> None:
    """Both numbers are named; without max_new_tokens an answer ends at the limit."""
    model = models[kind]
    prompt = texts(model, 41)
    assert count_written(model, prompt, max_new_tokens=20, min_new_tokens=19) == 20
    for ask in (model.generate, lambda *arguments, **options: next(iter(model.stream(*arguments, **options)))):
        with pytest.raises(ContextTooLong, match=r"has 41 tokens and max_new_tokens is 21, together 62, .* 61 pos"):
            ask(prompt, temperature=0, max_new_tokens=21)
        with pytest.raises(ContextTooLong, match=r"prompt 1 has 70 tokens.* the model has 61 positions"):
            ask(texts(model, 70), temperature=0)
    (ended,) = model.generate(prompt, temperature=0, min_new_tokens=19)
    # The last token of a table is not read.
    assert ended.stop_reason == "length" and len(ended.tokens) == 20 + (kind == "table")


def test_beyond_positions_lifts_a_declared_length_alone(models: dict[str, ch.Model]) -> None:
    model = models["declared"]
    long = texts(model, 70)
    assert count_written(model, long, max_new_tokens=5, min_new_tokens=4, beyond_positions=True) == 5
    assert "".join(model.stream(long, max_new_tokens=5, temperature=0, beyond_positions=True))
    with pytest.raises(InputError, match=r"compute their positions.*: leave it out"):
        models["table"].generate(PROMPT, beyond_positions=True)


def test_beyond_the_limit_the_model_computes_what_it_did(models: dict[str, ch.Model]) -> None:
    """The limit changes no number: its greedy continuation is that of the module itself."""
    model = models["declared"]
    ids = [*model.tokenizer.encode(texts(model, 70))]
    for _ in range(4):
        with torch.no_grad():
            logits = model.module(torch.tensor([ids])).logits[0, -1]
        logits[0] = -torch.inf  # the end token
        ids.append(int(logits.argmax()))
    (actual,) = model.generate(
        texts(model, 70), temperature=0, max_new_tokens=4, min_new_tokens=3, beyond_positions=True
    )
    assert actual.tokens[:3] == model.tokenizer.tokens(ids[70:73])


def test_the_command_line_follows_the_same_rule(models: dict[str, ch.Model], capfd: pytest.CaptureFixture[str]) -> None:
    assert models["declared"].hf_checkpoint is not None
    call = ["generate", str(models["declared"].hf_checkpoint.folder), "--prompt", texts(models["declared"], 70)]
    call += ["--greedy", "--max-new-tokens", "3", "--json"]
    assert main(call) == 2
    assert "has 70 tokens" in (message := capfd.readouterr().err) and "or set --beyond-positions" in message
    assert main([*call, "--beyond-positions"]) == 0
    assert len(json.loads(capfd.readouterr().out)["tokens"]) <= 3


def test_other_doors_read_no_more_than_the_declared_length(models: dict[str, ch.Model]) -> None:
    """A longer text is scored in windows, as with a table; a view of it is allowed, for a model can be looked at."""
    model = models["declared"]
    long = texts(model, 130)
    ids = [0, *model.tokenizer.encode(long), 0]
    expected = []
    for start in range(0, len(ids) - 1, 61):
        window = ids[start : start + 62]
        with torch.no_grad():
            log_probs = model.module(torch.tensor([window[:-1]])).logits[0].log_softmax(-1)
        expected += log_probs.gather(1, torch.tensor(window[1:])[:, None])[:, 0].tolist()
    assert model.score(long).log_probability == pytest.approx(sum(expected), rel=1e-5)
    assert model.attention(texts(model, 58), generate=9).tokens


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (None, 61),
        (spec.LinearScaling(factor=4.0), 244),
        (spec.DynamicScaling(factor=2.0, original_length=61), 122),
        (spec.YarnScaling(factor=4.0, original_length=29), 116),
        (spec.YarnScaling(factor=2.0, original_length=29), 61),
        (
            spec.BandScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=7),
            61,
        ),
        (spec.LongRopeScaling(short_factor=(1.0,) * 7, long_factor=(2.0,) * 7, original_length=31), 61),
    ],
)
def test_scaled_rotations_extend_the_declared_length(scaling: Any, limit: int) -> None:
    """By the factor where max_position_embeddings is the length before scaling; it is not lowered by any."""
    assert spec.Rotary(scaling=scaling).extended_length(61) == limit


def test_a_saved_checkpoint_declares_what_was_loaded(tmp_path: Path) -> None:
    """Also where the config is written anew, and where only some layers are scaled."""
    scaled = {"rope_type": "linear", "factor": 4.0}
    for number, (settings, limit) in enumerate((({}, 61), ({"rope_scaling": scaled}, 244))):
        model = ch.load(rotary_model(tmp_path / f"from{number}", **settings), precision="fp32")
        assert (model.spec.declared_length, model.spec.position_limit) == (61, limit)
        again = ch.surgery.keep_layers(model, [0]).model
        for name, each_model in (("same", model), ("shorter", again)):
            each_model.save(tmp_path / f"{name}{number}", format="hf")
            config = json.loads((tmp_path / f"{name}{number}/config.json").read_text())
            assert config["max_position_embeddings"] == 61
        model.save(tmp_path / f"own{number}")
        assert ch.load(tmp_path / f"own{number}", precision="fp32").spec.position_limit == limit


def test_truncation_reads_the_start_of_a_long_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The answer is that of the longest start that the encoder reads, and a warning counts the texts."""
    model = ch.load(translator(tmp_path / "mt"), precision="fp32")
    long = "the cat sat on the mat " * 30
    with pytest.raises(ContextTooLong, match="the model has 47 positions"):
        model.generate(long, temperature=0)
    with pytest.warns(LongTexts, match="1 text is longer than the 47 tokens"):
        (cut,) = model.generate(long, temperature=0, truncate=True)
    ids = model.tokenizers.source.encode(long)[:46]
    writer = make_writer(model, model.module, ["max_new_tokens"])
    request = writer.prompt_request([""], model.generate_options(temperature=0))
    ((expected,),) = generate_ids(model.module, replace(request, sources=[[*ids, model.tokenizers.source.eos_id]]))
    assert len(cut.tokens) == len(expected.ids) > 3 and cut.score == pytest.approx(expected.score, abs=1e-5)
    assert main(["generate", str(tmp_path / "mt"), "--prompt", long, "--greedy", "--truncate"]) == 0
    assert capfd.readouterr().out.strip() == cut.text.strip()


def test_truncation_is_refused_where_nothing_is_truncated(models: dict[str, ch.Model]) -> None:
    with pytest.raises(InputError, match=r"truncate .* a decoder continues the end of its prompt"):
        models["table"].generate(PROMPT, truncate=True)
