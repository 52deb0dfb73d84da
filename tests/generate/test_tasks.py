"""A task that a checkpoint lists: its prefix, its settings, and a search that stops early as transformers' does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import clearhead
from clearhead.base.errors import InputError
from tests.apps.cli.test_commands import run
from tests.apps.cli.test_generate import run_refused
from tests.checkpoints.hf import tokenizer_folders

TASKS = {
    "summarization": {
        "prefix": "the cat: ", "num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "max_length": 14,
        "no_repeat_ngram_size": 2,
    },
    "translation_en_to_de": {"prefix": "dog to Hund: ", "num_beams": 3, "early_stopping": True, "max_length": 12},
    "nothing": {"num_beams": 2},
}  # fmt: skip
TEXTS = ["a small dog runs", "the cat sat on the mat", "look", "green grass in 1998!", "and the dog looked at it"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "model"
    model = tokenizer_folders.pieces_model("unigram", t5=True)
    rows = tokenizer_folders.processor(model).get_piece_size() + 100
    torch.manual_seed(5)
    config = transformers.T5Config(
        vocab_size=rows, d_model=26, d_kv=10, d_ff=31, num_layers=2, num_heads=3, decoder_start_token_id=0,
        initializer_factor=6.0,
    )  # fmt: skip
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        theirs.shared.weight[1] *= 2.55  # so that sequences end, and searches differ in when they stop
    theirs.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    config_json = json.loads((folder / "config.json").read_text()) | {"task_specific_params": TASKS}
    tokenizer_folders.write(
        folder,
        {
            "spiece.model": model,
            "tokenizer_config.json": {"tokenizer_class": "T5Tokenizer"},
            "config.json": config_json,
        },
    )
    return folder


def theirs(folder: Path, ids: list[int], task: str) -> list[int]:
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    task_config = {key: value for key, value in TASKS[task].items() if key != "prefix"}
    settings = transformers.GenerationConfig(
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, do_sample=False, use_cache=False, **task_config
    )
    with torch.no_grad():
        actual = model.generate(torch.tensor([ids]), generation_config=settings)[0].tolist()[1:]
    return actual[: actual.index(1) + 1] if 1 in actual else actual


@pytest.mark.parametrize("task", ["summarization", "translation_en_to_de"])
def test_a_task_is_done_as_there(folder: Path, task: str) -> None:
    model = clearhead.load(folder, device="cpu", precision="fp32")
    chosen, prefix = model.for_task(task)
    assert prefix == TASKS[task]["prefix"]
    for text in TEXTS:
        ids = [*model.tokenizer.encode(prefix + text), 1]
        (actual,) = chosen.generate(prefix + text)
        expected = theirs(folder, ids, task)
        assert actual.tokens == model.tokenizer.tokens(expected), text
        assert (actual.stop_reason == "end") == (expected[-1] == 1)


def test_a_prefix_names_its_task_and_the_command_takes_both(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = clearhead.load(folder, device="cpu", precision="fp32")
    (expected,) = model.for_task("the cat:")[0].generate("the cat: look")
    for name in ("summarization", "the cat:", "the cat: "):
        command = (
            "generate",
            str(folder),
            "--prompt",
            "look",
            "--task",
            name,
            "--precision",
            "fp32",
            "--device",
            "cpu",
        )
        assert run(capfd, *command).rstrip("\n") == expected.text.rstrip("\n")
    assert "task summarization: the cat:" in run(capfd, "inspect", str(folder))


def test_what_is_not_listed_is_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ("generate", str(folder), "--prompt", "look", "--task")
    assert "lists no task 'sumarization' (did you mean 'summarization'?)" in run_refused(
        capfd, *command, "sumarization"
    )
    with pytest.raises(InputError, match="it lists: summarization \\('the cat:'\\); translation_en_to_de"):
        clearhead.load(folder).for_task("nothing")
    config = json.loads((folder / "config.json").read_text()) | {
        "task_specific_params": None,
        "early_stopping": "often",
    }
    tokenizer_folders.write(
        tmp_path, {path.name: path.read_bytes() for path in folder.iterdir()} | {"config.json": config}
    )
    with pytest.raises(InputError, match="early_stopping: expected a valid boolean, got 'often'; or expected 'never'"):
        clearhead.load(tmp_path)
    tokenizer_folders.write(tmp_path, {"config.json": config | {"early_stopping": None}})
    with pytest.raises(InputError, match="lists no tasks: write the prefix into the prompt"):
        clearhead.load(tmp_path).for_task("summarization")
