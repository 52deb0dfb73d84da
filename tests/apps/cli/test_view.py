"""`clearhead view`: a page or a picture of what a model attends to, and one sentence where that is impossible."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base.commands import make_install_command

TEXT = "a m u"


def data_of(page: Path) -> dict[str, object]:
    text = page.read_text("utf-8")
    start = text.index('id="data">') + len('id="data">')
    page_data: dict[str, object] = json.loads(text[start : text.index("</script>", start)])
    return page_data


def test_a_page_of_what_the_model_writes(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "heads.html"
    assert main(["view", str(trained / "run"), TEXT, "-o", str(page), "--json"]) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    maps = ch.load(str(trained / "run")).attention(TEXT)
    assert record == {"path": str(page), **maps.token_lists()}
    assert record["written_tokens"][:-1] == record["target_tokens"][1:]
    assert main(["view", str(trained / "run"), TEXT, "-o", str(page), "--force", "--effects"]) == 0
    assert "effects: " in capfd.readouterr().err


def test_checkpoints_are_played_on_the_same_tokens(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "heads.html"
    assert main(["view", str(trained / "run"), TEXT, "--checkpoints", "-o", str(page)]) == 0
    data = data_of(page)
    samples = data["samples"]
    assert isinstance(samples, list) and data["timeline"] is True
    best = int((trained / "run" / "best").read_text().removeprefix("step-"))
    labels = [f"{step} (best)" if step == best else f"{step}" for step in (0, 1, 2, 3, 5, 6)]
    assert [sample["label"] for sample in samples] == [f"step {step}" for step in labels]
    assert ["steps kept", " · ".join(labels)] in data["facts"]
    assert all(sample["rows"] == samples[0]["rows"] for sample in samples)


def test_a_run_that_keeps_few_checkpoints_plays_how_it_began(runs: Callable[[str], Path], tmp_path: Path) -> None:
    """Also a classifier, whose head is untrained at step 0: no answer of it is wanted."""
    page, run = tmp_path / "heads.html", tmp_path / "run"
    shutil.copytree(runs("classify"), run)
    assert main(["view", str(run), TEXT, "--checkpoints", "-o", str(page)]) == 0
    data = data_of(page)
    labels = [sample["label"].removesuffix(" (best)") for sample in data["samples"]]  # type: ignore[union-attr]
    assert labels == [f"step {step}" for step in (0, 1, 2, 5, 10, 22, 30, 46, 60)]


def test_two_texts_and_two_models_stand_side_by_side(trained: Path, tmp_path: Path) -> None:
    ref, page = str(trained / "run"), str(tmp_path / "heads.html")
    assert main(["view", ref, TEXT, "--target", "u a", "--compare", "b n v", "-o", page]) == 0
    samples = data_of(Path(page))["samples"]
    assert isinstance(samples, list) and [sample["label"] for sample in samples] == [TEXT, "b n v"]
    assert main(["view", ref, TEXT, "--compare-with", f"{ref}@step-3", "-o", page, "--force"]) == 0
    samples = data_of(Path(page))["samples"]
    assert isinstance(samples, list) and [sample["label"] for sample in samples] == [ref, f"{ref}@step-3"]
    assert samples[0]["rows"] == samples[1]["rows"], "one vocabulary: both read what the first one wrote"


def test_a_model_of_another_vocabulary_reads_the_same_text(
    runs: Callable[[str], Path], trained: Path, tmp_path: Path
) -> None:
    page = tmp_path / "heads.html"
    assert main(["view", str(trained / "run"), TEXT, "--compare-with", str(runs("fill")), "-o", str(page)]) == 0
    samples = data_of(page)["samples"]
    assert isinstance(samples, list) and [list(sample["rows"]) for sample in samples] == [
        ["encoder", "decoder", "written"], ["encoder"],
    ]  # fmt: skip


def test_the_search_tree_is_on_the_page(trained: Path, tmp_path: Path) -> None:
    page = tmp_path / "heads.html"
    assert main(["view", str(trained / "run"), TEXT, "--beam-size", "3", "-o", str(page)]) == 0
    samples = data_of(page)["samples"]
    assert isinstance(samples, list)
    nodes = samples[0]["beams"]
    assert nodes[0]["parent"] == -1 and sum(node["rank"] == 0 for node in nodes) == 1
    assert {node["state"] for node in nodes} == {"kept", "pruned", "finished"}


def test_pictures_and_arrays(trained: Path, tmp_path: Path) -> None:
    ref = str(trained / "run")
    head_options = ["--stack", "decoder.memory", "--layers", "0", "--heads", "1"]
    assert main(["view", ref, TEXT, *head_options, "-o", str(tmp_path / "head.svg")]) == 0
    assert main(["view", ref, TEXT, "--view", "overview", "-o", str(tmp_path / "heads.png")]) == 0
    assert main(["view", ref, TEXT, "--heads", "1", "-o", str(tmp_path / "heads.npz")]) == 0
    assert "<svg" in (tmp_path / "head.svg").read_text("utf-8")
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    with np.load(tmp_path / "heads.npz") as arrays:
        weights = ch.load(ref).attention(TEXT).weights("decoder.memory", 0, 1)
        assert np.allclose(arrays["decoder.memory"][0, 0], weights, atol=1e-6)


def test_without_a_name_the_page_is_named_after_the_model(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", f"{trained}/run@step-3", TEXT]) == 0
    assert capfd.readouterr().out.strip() == "run-step-3.html" and (tmp_path / "run-step-3.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], "the text is empty: give at least one word"),
        ([" \t"], "the text is empty: give at least one word"),
        ([TEXT, "--compare", ""], "the text is empty: give at least one word"),
        ([TEXT, "--target", ""], "the target is empty: give at least one word"),
        ([TEXT, "--layers", "7"], "this model has no layer 7; it has 0"),
        ([TEXT, "--heads", "0-5"], "this model has no head 2; it has 0, 1"),
        (
            [TEXT, "--layers", "one"],
            "--layers one is not a list of numbers; expected numbers and ranges, such as 0,3-5",
        ),
        ([TEXT, "--heads", "3-1"], "--heads 3-1 is not a list of numbers"),
        ([TEXT, "-o", "x.pdf"], "has an unknown ending: expected .html, .svg, .png or .npz"),
        ([TEXT, "-o", "x.svg", "--effects"], "has no effect on x.svg"),
        ([TEXT, "-o", "x.svg", "--layers", "0-1"], "a picture shows one head"),
        (
            [TEXT, "-o", "x.svg", "--layers", "0", "--heads", "0"],
            "give --stack (encoder.self, decoder.self, decoder.memory), --layers and --heads",
        ),
        ([TEXT, "--stack", "decoder.self"], "--view and --stack have no effect on"),
        ([TEXT, "--compare", "a", "--checkpoints"], "exclude each other: give one of them"),
        ([TEXT, "--of", "99"], "--of has position 99"),
        ([TEXT, "--of", "1", "--of", "never"], "the vocabulary has no token 'never'"),
        ([TEXT, "--of", "a", "--of", "b", "--of", "n"], "--of got 3 outputs: give one, or two"),
        ([TEXT, "--of", "never"], "the vocabulary has no token 'never'"),
        ([TEXT, "-o", "x.svg", "--view", "overview", "--heads", "0"], "leave --layers and --heads out"),
        ([TEXT, "-o", "file/x.html"], "file is not a folder"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    words: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["view", str(trained / "run"), *arguments]) == 2
    message = capfd.readouterr().err
    assert words in message and message.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_run_with_one_checkpoint_has_nothing_to_play(
    runs: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, saved = tmp_path / "run", tmp_path / "saved"
    shutil.copytree(runs("fill"), run)
    for folder in [*(run / "checkpoints").glob("step-[0-3]"), run / "checkpoints" / "snapshots"]:
        shutil.rmtree(folder)
    ch.load(str(run)).save(saved)
    for ref, expected in ((run, "kept 1: train it with snapshots = 10 under [train]"), (saved, "is not a run")):
        assert main(["view", str(ref), "a ___ m", "--checkpoints"]) == 2
        assert expected in capfd.readouterr().err and not [*tmp_path.glob("*.html")]


def test_a_target_for_an_encoder_is_refused(
    runs: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", str(runs("classify")), TEXT, "--target", "a"]) == 2
    assert "this model has no decoder to read a target: leave the target out" in capfd.readouterr().err


def test_a_text_too_long_for_a_page_is_refused_before_it_is_read(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clearhead.interpret.view.explorer.encode.LARGEST", 700)
    monkeypatch.setattr(
        "clearhead.interpret.maps.attention_maps.record_states", lambda *_: pytest.fail("the model has run")
    )
    assert main(["view", str(trained / "run"), "a m u " * 11, "-o", str(tmp_path / "p.html")]) == 2
    assert "a page holds up to 700 attention weights, and this one would hold 1,089" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--port", "8000"], "clearhead: --port has no effect without --serve: add --serve"),
        (["--serve", "-o", "x.html", "--effects"], "--effects, --output has no effect on a live page: leave it out"),
    ],
)
def test_a_live_page_refuses_what_has_no_effect(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", "runs/any", "a text", *options]) == 2
    assert expected in capsys.readouterr().err


def test_a_live_page_names_missing_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clearhead.apps.cli.view.find_spec", lambda name: None)
    assert main(["view", "runs/any", "a text", "--serve"]) == 2
    needs = "--serve needs fastapi and uvicorn; install them: "
    assert needs + make_install_command(extra="serve") in capsys.readouterr().err
