"""`clearhead inspect` says what a model was trained for, what its head does, and what its decoder sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import clearhead
from clearhead.apps.cli.main import main
from clearhead.interpret.maps.hook_points import addresses
from tests import hf_models
from tests.apps.cli.test_commands import run
from tests.hf_specs import hf_specs

Runs = Callable[[str], Path]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("classify", ["classify, on texts of at most 16 tokens", "one of 2: early, late", "pool mean, linear 14"]),
        ("pair", ["classify, on pairs of texts"]),
        ("number", ["a number", "linear 1"]),
        ("several", ["several of 2: a, m"]),
        ("embed", ["embed, on texts", "pool mean, l2_normalize"]),
        ("generate", ["generate, on texts", "causal, in the decoder", "FLOPs for a token", "cache"]),
        ("denoise", ["denoise, on texts", "causal, in the decoder", "for each source token"]),
    ],
)
def test_purpose(kind: str, expected: list[str], runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    out = run(capfd, "inspect", str(runs(kind)))
    assert all(words in out for words in expected), out
    assert ("mask  " in out) == ("cache  " in out) == (kind in ("generate", "denoise"))


def test_what_a_model_costs_comes_first_and_its_weights_last(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    lines = run(capfd, "inspect", str(runs("denoise"))).splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["parameters", "memory", "cache", "cost", "task", "head"]
    modes = [line.split(":")[0] for line in lines if line.startswith("attention")]
    assert modes == ["attention   training and evaluation"], "what holds in both modes is said once"
    tree, weights = lines.index("model: Model"), lines.index("weights")
    assert 0 < tree < weights and all(line.startswith("  ") for line in lines[weights + 1 :])
    assert "bias=True" not in "".join(lines[tree:weights]), "what is at its default is left out"


def test_it_says_how_a_gpu_decodes(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "decoding    on a GPU, steps are recorded once" in run(capfd, "inspect", str(runs("generate")))
    assert "decoding  " not in run(capfd, "inspect", str(runs("embed")))
    monkeypatch.setenv("CLEARHEAD_KERNELS", "plain")
    record = json.loads(run(capfd, "inspect", str(runs("generate")), "--json").splitlines()[-1])
    assert record["decoding"] == {"by": "plain", "why": "CLEARHEAD_KERNELS=plain"}


def test_products_in_bf16_are_said_by_inspect_alone(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("clearhead.model.loading", "clearhead.fast.runner"):
        monkeypatch.setattr(f"{module}.multiplies_in_bf16", lambda model: True)
    assert run(capfd, "inspect", str(runs("embed"))).count("auto multiplies in bf16 here") == 1
    (tmp_path / "text.txt").write_text("a m u\n", encoding="utf-8")
    capfd.readouterr()
    assert main(["embed", str(runs("embed")), str(tmp_path / "text.txt"), "--json"]) == 0
    assert "bf16" not in capfd.readouterr().err


def test_parts_that_kernels_run_are_named_and_whether_results_depend_on_the_batch(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = json.loads(run(capfd, "inspect", str(runs("generate")), "--json"))["served"]
    assert {"address": "decoder", "by": "kernels", "why": "float32"} in served
    assert "kernels     decoder, head.layers.0: by clearhead kernels" in run(capfd, "inspect", str(runs("generate")))
    encoder = json.loads(run(capfd, "inspect", str(runs("classify")), "--json"))["served"]
    assert {(served["by"], served["why"]) for served in encoder} == {("kernels", "float32")}
    assert "results do not depend on the rest of the batch" in run(capfd, "inspect", str(runs("generate")))
    assert "auto multiplies in bf16" not in run(capfd, "inspect", str(runs("generate")))
    monkeypatch.setenv("CLEARHEAD_KERNELS", "plain")
    assert "results depend, in their last digits, on" in run(capfd, "inspect", str(runs("generate")))
    assert "kernels     model: plain: CLEARHEAD_KERNELS=plain" in run(capfd, "inspect", str(runs("generate")))
    assert json.loads(run(capfd, "inspect", "gpt2", "--json"))["served"] == []


def test_json(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    run_directory = runs("classify")
    record = json.loads(run(capfd, "inspect", str(run_directory), "--json"))
    assert record["task"]["kind"] == "classify" and record["task"]["labels"] == ["early", "late"]
    assert record["head"] == "pool mean, linear 14, activation tanh, linear 2" and record["masks"] == []
    assert json.loads(run(capfd, "inspect", str(runs("generate")), "--json"))["masks"] == ["causal"]


def test_a_spec_that_stands_alone_has_no_task(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alone = tmp_path / "spec.json"
    alone.write_bytes((runs("classify") / "spec.json").read_bytes())
    assert json.loads(run(capfd, "inspect", str(alone), "--json"))["task"] is None
    assert "task  " not in run(capfd, "inspect", str(alone))


def test_addresses_of_a_run(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    ref = str(runs("classify"))
    lines = run(capfd, "inspect", ref, "--addresses").splitlines()
    assert "logits" in lines[1] and lines[1].endswith("[batch, 2]")
    shown = {line.split()[0]: line for line in lines}
    attention = next(line for address, line in shown.items() if address.endswith("function.weights"))
    assert attention.endswith("queries, keys]") and "layers." in attention
    record = json.loads(run(capfd, "inspect", ref, "--addresses", "--json"))
    module = clearhead.load(ref).module
    listed = {shape["address"]: shape["shape"] for shape in record["addresses"]}
    assert set(listed) <= set(addresses(module)) and listed["logits"] == ["batch", 2]
    assert record["parameters"] > 0
    assert "addresses" not in json.loads(run(capfd, "inspect", ref, "--json"))


def test_addresses_of_a_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(hf_models.translator(tmp_path))
    out = run(capfd, "inspect", folder, "--addresses")
    assert "encoder.layers.{0..1}.steps.0.branches.0.function.queries" in out
    assert "decoder.layers.0.steps.1.branches.0.function.keys" in out


def test_layers_that_are_alike_share_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = hf_specs()["modernbert"]
    (tmp_path / "spec.json").write_text(model.to_json())
    lines = run(capfd, "inspect", str(tmp_path / "spec.json"), "--addresses").splitlines()
    norms = [line for line in lines if line.split()[0].endswith("steps.0.branches.0.pre")]
    assert [line.split()[0].split(".", 2)[2].partition(".steps")[0] for line in norms] == ["0", "{1..4}"]
    assert [line.endswith("identity") for line in norms] == [True, False]
    assert max(map(len, lines)) < 100


@pytest.mark.parametrize("name", ["bert", "bert_base"])
def test_a_preset_has_the_sizes_of_its_paper(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    record = json.loads(run(capfd, "inspect", name, "--json"))
    assert (
        record["spec"]["encoder"]["width"] == 768 and record["spec"]["encoder"]["embedding"]["table"]["rows"] == 30522
    )
    assert 105e6 < record["parameters"] < 115e6


def test_a_folder_is_read_before_a_preset(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    for name in ("format.json", "spec.json"):
        Path("gpt2", name).write_bytes((runs("classify") / name).read_bytes())
    assert json.loads(run(capfd, "inspect", "gpt2", "--json"))["spec"]["encoder"]["width"] == 14


def test_an_unknown_reference_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "german-english").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for wrong in ("german-englsh", str(tmp_path / "german-englsh"), "./german-englsh"):
        assert main(["inspect", wrong]) == 2
        assert "did you mean 'german-english'?" in capfd.readouterr().err
    assert main(["inspect", "tarnsformer"]) == 2
    assert "did you mean 'transformer'?" in capfd.readouterr().err
    assert main(["inspect", "zzz"]) == 2
    assert "or a preset: transformer, transformer-big, bert" in capfd.readouterr().err


def test_the_architecture_is_drawn(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "model.svg"
    assert run(capfd, "inspect", str(runs("classify")), "--svg", str(file)) == f"{file}\n"
    assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert json.loads(run(capfd, "inspect", "gpt2", "--svg", str(tmp_path / "b.svg"), "--json"))["picture"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.svg", "new"]
    assert "124M parameters" in (tmp_path / "b.svg").read_text("utf-8")


def test_a_picture_is_replaced_by_force(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpt2.svg"
    file.write_text("mine")
    run(capfd, "inspect", "gpt2", "--svg", str(file), "--force")
    assert file.read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--svg", "model.png"], "give a name that ends in .svg"),
        (["--svg", "file/model.svg"], "file/model.svg cannot be written"),
        (["--force"], "--force has no effect without --svg"),
        (["--svg", "model.svg", "--length", "3"], "--length has no effect with --svg"),
    ],
)
def test_a_picture_that_cannot_be_written(
    options: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert main(["inspect", "gpt2", *options]) == 2
    captured = capfd.readouterr()
    assert expected in captured.err.splitlines()[-1] and "Traceback" not in captured.err and not captured.out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_folder_lacks_the_files_of_runs_and_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "spec.json, or config.json as in a Hugging Face checkpoint, is missing" in capsys.readouterr().err
