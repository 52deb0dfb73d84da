"""A sound model has no findings; the output, files and exit code of the command are right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead import load
from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.model import flow
from clearhead.apps.check.model.health import check_tokenizers
from clearhead.apps.check.model.invariances import check_saving
from clearhead.apps.check.model.model import check_module
from clearhead.apps.check.model.readers import Reader
from clearhead.apps.check.model.report import report_html
from clearhead.apps.cli.main import main
from clearhead.checkpoints.hf import saving
from clearhead.checkpoints.hf.loading import load_module
from clearhead.fast.stored import INT8, StoredRows, store, widen_weights
from tests import hf_models
from tests.laws.tiny import tiny
from tests.parity.architectures.harness import all_cases, theirs_of

CASES = {case.name: case for case in all_cases()}
SAMPLE = ("t5", "mixtral", "albert")
"""Two stacks with relative buckets, a mixture of experts, and shared layers."""


@pytest.mark.filterwarnings("ignore:.* beyond the vocabulary of:UserWarning")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sound_model_is_accused_of_nothing(name: str, tmp_path: Path) -> None:
    """All other architectures: see docs/results.md."""
    theirs_of(CASES[name]).save_pretrained(tmp_path)
    module = load_module(tmp_path).module
    report = check_module(module, name)
    assert report.ok and not report.findings, str(report)
    assert sum(outcome.verdict == "right" for outcome in report.outcomes) >= 15
    assert "✗" not in report_html(report)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.language_model(tmp_path_factory.mktemp("check") / "model")


def test_the_command_reports_and_writes_a_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert main(["check", str(folder), "--json", "--html", str(page)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["ok"] and all(result["severity"] == "warning" for result in record["findings"])
    assert {result["verdict"] for result in record["information_flow"]} == {"right"}
    assert record.keys() >= {"information_flow", "invariances", "health"}
    assert "kernels_and_precisions" not in record
    assert [result["verdict"] for result in record["invariances"][-2:]] == ["right", "right"], "saved and loaded"
    text = page.read_text("utf-8")
    assert (
        text.count("<svg") == 3
        and "<script" not in text
        and "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    )
    assert main(["check", str(folder), "--html", str(page)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_what_is_wrong_with_the_weights_ends_in_1(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"][2, 3] = float("nan")
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    assert main(["check", str(wrong)]) == 1
    out = capsys.readouterr().out
    assert "decoder.layers.1.steps.1.branches.0.function.up.weight" in out and "1 of " in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["MODEL", "--steps", "3"], "is a checkpoint or a run: --steps would have no effect"),
        (["MODEL", "--hint", "1"], "--hint would have no effect"),
        (["MODEL", "--precision", "bf16"], "is checked in single and in double precision: --precision would have no"),
        (["MODEL", "--force"], "--force has no effect without --html"),
        (
            ["MODEL", "--against", "transformers", "--precision", "bf16"],
            "is compared on the CPU in fp32: --precision would",
        ),
        (["MODEL", "--tolerance", "0.1"], "add --against transformers"),
        (["mine.py", "--html", "a.html"], "is a Python file: --html would have no effect"),
        (["mine.py", "--device", "cpu", "--seed", "3"], "--device and --seed would have no effect"),
    ],
)
def test_an_option_without_effect_is_refused(
    arguments: list[str], expected: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("")
    ref = {"MODEL": str(folder), "mine.py": str(tmp_path / "mine.py")}[arguments[0]]
    assert main(["check", ref, *arguments[1:]]) == 2
    assert expected in capsys.readouterr().err


def test_a_file_that_is_read_otherwise_than_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted defect: a file in Hugging Face's layout has two rows exchanged."""
    model = load(folder)
    assert not [result for result in check_saving(model) if isinstance(result, Finding)]
    right = saving.module_to_hf_tensors
    name = "transformer.h.1.mlp.c_fc.weight"

    def exchange(*args: Any, **options: Any) -> Any:
        tensors = right(*args, **options)
        return {**tensors, name: tensors[name].roll(1, 1)}

    monkeypatch.setattr(saving, "module_to_hf_tensors", exchange)
    (finding,) = (result for result in check_saving(model) if isinstance(result, Finding))
    assert finding.where == "decoder.layers.1.steps.1.branches.0.function.up.weight"
    assert finding.says.startswith("save = load, Hugging Face layout: 1 of ")


def test_a_tokenizer_of_another_model_is_named(folder: Path) -> None:
    model = load(folder)
    smaller = tiny("decoder/post/learned")
    assert smaller.num_source_ids < model.tokenizers.source.vocab_size
    assert not [result for result in check_tokenizers(model.module, model.tokenizers) if isinstance(result, Finding)]
    findings = [result for result in check_tokenizers(smaller, model.tokenizers) if isinstance(result, Finding)]
    assert findings and findings[0].severity == "wrong"
    assert f"but the table has {smaller.num_source_ids:,} rows" in findings[0].says


def test_ids_are_compared_without_a_widened_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of a model in 8 bits took the memory of its embedding table in double precision."""
    module = store(tiny("decoder/pre-grouped/rotary"), INT8)
    widened = tiny("decoder/pre-grouped/rotary")
    widened.load_state_dict(dict(widen_weights(module.state_dict())))
    ids = torch.arange(8)
    expected = flow._other_ids(Reader(widened, "decoder"), ids)
    monkeypatch.setattr(StoredRows, "weight", property(lambda _: pytest.fail("the table was widened")))
    actual = flow._other_ids(Reader(module, "decoder"), ids)
    assert torch.equal(actual, expected) and not torch.equal(actual, ids)
