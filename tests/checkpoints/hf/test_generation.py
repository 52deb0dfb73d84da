"""Generation settings: those that a class has where a config says nothing, and ids that a vocabulary lacks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.files.tensor_files import read_config
from clearhead.checkpoints.hf.generation import DEFAULT_IDS, read_generation_config
from tests import hf_models
from tests.checkpoints.hf import tokenizer_folders
from tests.laws.tiny import tiny

KEYS = ("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "forced_eos_token_id")
VOCABULARY, MERGES = tokenizer_folders.merges(("<|endoftext|>",))
SIZES = {
    "vocab_size": len(json.loads(VOCABULARY)), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 22,
}  # fmt: skip
OLDER = {key: SIZES[key] for key in ("vocab_size", "hidden_size")} | {"num_layers": 1, "num_heads": 2}
SMALL: dict[str, dict[str, Any]] = {
    "cohere": SIZES,
    "gpt2": {"vocab_size": SIZES["vocab_size"], "n_embd": 16, "n_layer": 1, "n_head": 2},
    "gpt_neo": {**OLDER, "attention_types": [[["global"], 1]], "max_position_embeddings": 61},
    "gptj": {"vocab_size": SIZES["vocab_size"], "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4},
    "olmo": SIZES,
    "olmo2": SIZES,
    "olmo3": SIZES,
    "phi3": {**SIZES, "pad_token_id": 0},
    "smollm3": {**SIZES, "pad_token_id": 0},
    "starcoder2": SIZES,
}
"""Configs that name an end which their vocabulary lacks, because the class does."""


def small(model_type: str, folder: Path, settings: dict[str, object] | None = None) -> Path:
    torch.manual_seed(3)
    config = transformers.CONFIG_MAPPING[model_type](**SMALL[model_type])
    hf_models.save(transformers.AutoModelForCausalLM.from_config(config), folder, settings)
    tokenizer_config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    return tokenizer_folders.write(
        folder, {"vocab.json": VOCABULARY, "merges.txt": MERGES, "tokenizer_config.json": tokenizer_config}
    )


@pytest.mark.parametrize("model_type", DEFAULT_IDS)
def test_they_are_those_of_the_class(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    values = {key: getattr(config, key, None) for key in KEYS}
    assert dict(DEFAULT_IDS[model_type]) == {key: index for key, index in values.items() if index is not None}


def test_what_a_config_says_wins(tmp_path: Path) -> None:
    module = tiny("encoder-decoder/post/sinusoidal")
    (tmp_path / "config.json").write_text('{"model_type": "bart", "eos_token_id": 7}')
    config = read_generation_config(tmp_path, read_config(tmp_path), module)
    assert (config.decoder_start_id, config.pad_id, config.bos_id, config.eos_ids, config.forced_eos_id) == (
        2,
        1,
        0,
        (7,),
        2,
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "num_beams": 3}))
    config = read_generation_config(tmp_path, read_config(tmp_path), module)
    assert (config.decoder_start_id, config.eos_ids, config.forced_eos_id) == (2, (9,), None)


@pytest.mark.parametrize("model_type", SMALL)
def test_a_default_end_that_the_vocabulary_lacks_is_left_out(model_type: str, tmp_path: Path) -> None:
    folder = small(model_type, tmp_path / "small")
    with pytest.warns(UserWarning, match=r"eos_token_id = \d+ (is|are) beyond the vocabulary of") as caught:
        model = ch.load(folder, device="cpu", precision="fp32")
    assert len(caught) == 1
    ids = model.tokenizer.encode("the cat")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)[0, len(ids) :].tolist()
    (generation,) = model.generate("the cat", max_new_tokens=5, temperature=0)
    assert generation.tokens == model.tokenizer.tokens(expected)


def test_every_command_and_a_saved_model_say_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, saved = tmp_path / "small", tmp_path / "saved"
    small("gpt2", folder, {"bos_token_id": 0, "eos_token_id": 50256, "forced_eos_token_id": 400})
    message = "eos_token_id = 50256 and forced_eos_token_id = 400 are beyond the vocabulary"
    with pytest.warns(UserWarning, match=message):
        ch.load(folder, device="cpu", precision="fp32").save(saved)
    for command in (
        ["inspect", str(folder)],
        ["check", str(folder), "--against", "transformers"],
        ["convert", str(folder), str(tmp_path / "first"), "--to", "hf"],
        ["convert", str(saved), str(tmp_path / "second"), "--to", "hf"],
        ["generate", str(saved), "--prompt", "the cat", "--max-new-tokens", "3", "--temperature", "0"],
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert main(command) == 0, command
        assert capsys.readouterr().err.count(message) == 1, command
    names = (folder, tmp_path / "first", tmp_path / "second")
    assert len({(name / "generation_config.json").read_text() for name in names}) == 1


def test_every_command_refuses_a_decoder_start_beyond_the_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf_models.translator(tmp_path / "translator", {"decoder_start_token_id": 5000, "eos_token_id": 0})
    message = "decoder_start_token_id = 5000 is outside the vocabulary"
    with pytest.raises(InputError, match=message):
        ch.load(folder, device="cpu")
    for command in (
        ["inspect"],
        ["check", "--against", "transformers"],
        ["convert", str(tmp_path / "o"), "--to", "hf"],
    ):
        assert main([command[0], str(folder), *command[1:]]) == 2
        assert message in capsys.readouterr().err


def test_an_end_that_does_not_exist_has_no_row_that_a_smaller_vocabulary_must_keep(tmp_path: Path) -> None:
    folder = small("gpt2", tmp_path / "small")
    with pytest.warns(UserWarning, match="beyond"):
        model = ch.load(folder, device="cpu", precision="fp32")
    needed = sorted(model.tokenizer.needed_ids(["the cat"]))
    assert ch.surgery.cut_vocabulary(model, needed).model.module.num_target_ids == len(needed)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_id_of_minus_one_is_no_token(file: str, tmp_path: Path) -> None:
    folder = small("olmo", tmp_path / "small", {"max_new_tokens": 4, "do_sample": False})
    path, ids = folder / file, {"pad_token_id": -1, "bos_token_id": -1, "eos_token_id": -1}
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **ids}))
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    model = ch.load(folder, device="cpu", precision="fp32")
    assert model.hf_checkpoint is not None
    config = model.hf_checkpoint.generation_config
    assert (config.pad_id, config.bos_id, config.eos_ids, config.left_out) == (None, None, (), ())
    read = model.tokenizer.encode("the cat")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = theirs.generate(torch.tensor([read]), max_new_tokens=4, do_sample=False)[0, len(read) :].tolist()
    (generation,) = model.generate("the cat", max_new_tokens=4, temperature=0)
    assert generation.tokens == model.tokenizer.tokens(expected)
