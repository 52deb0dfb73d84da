"""The demo "generate": its run file, its score, and a tiny demo from end to end."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.apps.cli.main import main
from clearhead.apps.demo.common import DemoPlan, library_sources
from clearhead.apps.demo.generate import PROMPT, RECIPE, GenerateSizes, bits_per_byte, run_generate
from clearhead.base.errors import InputError
from clearhead.training.runfile.read import parse_run_file
from tests.apps.demo.demo_library import TINY, write_library


def sizes(library: Path) -> GenerateSizes:
    return GenerateSizes(max_bytes=20_011, max_valid_bytes=2_003, num_functions=2, max_new_tokens=11, folder=library)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """Return the run directory and the record of a tiny demo."""
    folder = tmp_path_factory.mktemp("generate")
    library = write_library(folder / "library")
    plan = DemoPlan(run=folder / "run", seed=3, overrides=TINY)
    return plan.run, run_generate(plan, sizes(library)).record


def test_the_run_file_trains_a_decoder_with_rotary_positions_and_muon() -> None:
    run = parse_run_file(RECIPE.format(run='"r"', train='"a"', valid='"b"'), "recipe")
    assert run.task.kind == "generate" and run.model.family == "decoder"
    assert run.model.positions == "rotary" and run.train.optimizer == "muon"


def test_it_makes_an_ordinary_run(finished: tuple[Path, dict[str, object]]) -> None:
    run, record = finished
    for name in ("run.toml", "spec.json", "metrics.jsonl", "plots/loss.png", "plots/heads.html"):
        assert (run / name).stat().st_size > 0, name
    assert main(["inspect", str(run)]) == 0
    json.dumps(record)


def test_both_parts_are_in_the_run(finished: tuple[Path, dict[str, object]]) -> None:
    run, _ = finished
    train, valid = ({path.name for path in (run / "data" / split).rglob("*.py")} for split in ("train", "valid"))
    assert train and valid and not train & valid


def test_bits_before_are_those_of_a_model_that_knows_nothing(finished: tuple[Path, dict[str, object]]) -> None:
    run, record = finished
    bits = record["bits_per_byte"]
    assert isinstance(bits, dict) and set(bits) == {"before", "after"}
    model = clearhead.load(f"{run}@step-0", device="cpu", precision="fp32")
    texts = [path.read_text(encoding="utf-8") for path in sorted((run / "data" / "valid").rglob("*.py"))]
    num_tokens = sum(len(model.tokenizer.encode(text)) + 1 for text in texts)
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    uniform = num_tokens * math.log2(model.tokenizer.vocab_size) / num_bytes
    assert bits["before"] == pytest.approx(uniform, rel=0.2)
    assert bits["after"] < bits["before"]


def test_bits_per_byte_are_those_of_the_whole_text(finished: tuple[Path, dict[str, object]]) -> None:
    run, _ = finished
    model = clearhead.load(str(run), device="cpu", precision="fp32")
    text = "def f(x):\n    return x\n"
    ids = torch.tensor([[model.tokenizer.bos_id, *model.tokenizer.encode(text), model.tokenizer.eos_id]])
    assert ids.shape[1] <= 61
    with torch.no_grad():
        log_probs = model.module(ids[:, :-1]).logits.double().log_softmax(-1)
    nats = -log_probs.gather(-1, ids[:, 1:, None]).sum().item()
    assert bits_per_byte(model, [text]) == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)


def test_functions_go_on_from_the_prompt(
    finished: tuple[Path, dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, record = finished
    functions = record["functions"]
    assert isinstance(functions, list) and len(functions) == 2 and functions[0] != functions[1]
    assert all(text.startswith(PROMPT) for text in functions)
    assert not re.search(r"\S", PROMPT.rpartition("def")[2]), "the model begins with the name"


def test_batch_size_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--batch-size has no effect"):
        run_generate(DemoPlan(run=tmp_path / "run", seed=1, batch_size=5))
    assert not (tmp_path / "run").exists()


def test_a_python_without_sources_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="standard library"):
        run_generate(DemoPlan(run=tmp_path / "run", seed=1), sizes(tmp_path / "empty"))
    assert not (tmp_path / "run").exists()


def test_the_made_up_library_has_both_parts(tmp_path: Path) -> None:
    sources = library_sources(max_bytes=20_011, max_valid_bytes=2_003, folder=write_library(tmp_path / "library"))
    assert len(sources.train) > 30 and sources.valid
