"""`clearhead diff` and `ch.diff` on trained models: snapshots, LoRA, an encoder and its classifier, added tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.interpret.difference.outputs import jensen_shannon
from clearhead.interpret.difference.report import Difference
from tests.apps.cli.tiny_tasks import task_tables, write_task
from tests.interpret.view.explorer.browser import browser

TEXTS = ["a m u", "e q y b n"]


def read_json(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, object]:
    assert main(["diff", *words, "--json"]) == code
    return dict(json.loads(capfd.readouterr().out.splitlines()[-1]))


def test_two_snapshots_of_a_run(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(trained / "run")
    capfd.readouterr()
    report = read_json(capfd, f"{run}@step-3", run)
    # The files, read row by row, give the numbers of the loaded models.
    loaded = json.loads(json.dumps(ch.diff(ch.load(f"{run}@step-3"), ch.load(run)).to_json()))
    assert report["changes"] == loaded["changes"] and report["largest"] == loaded["largest"] > 0.0
    assert not report["only_in_a"] and not report["only_in_b"] and not report["other_shape"] and report["texts"] is None
    same = read_json(capfd, run, run)
    assert same["largest"] == 0.0


def test_a_run_and_its_start_on_texts(runs: Callable[[str], Path]) -> None:
    run = str(runs("generate"))
    difference = ch.diff(f"{run}@step-0", run, TEXTS)
    assert difference.texts is not None
    a, b = ch.load(f"{run}@step-0", precision="fp32"), ch.load(run, precision="fp32")
    expected: list[tuple[float, bool]] = []
    rows: list[torch.Tensor] = []
    for text in TEXTS:
        ids = a.read(text).source.ids
        logits = [model.module(ids).logits[0, :, : a.tokenizer.vocab_size].double() for model in (a, b)]
        before, after = (scores.log_softmax(-1) for scores in logits)
        divergences = F.kl_div(after, before, log_target=True, reduction="none").sum(-1)
        differs = logits[0].argmax(-1) != logits[1].argmax(-1)
        expected += zip(divergences.tolist(), differs.tolist(), strict=True)
        weights = [model.attention(text).weights("decoder.self", 0, 1).double() for model in (a, b)]
        middle = (weights[0] + weights[1]) / 2
        entropy_of = [torch.special.entr(state).sum(-1) for state in (middle, *weights)]
        rows.append(entropy_of[0] - (entropy_of[1] + entropy_of[2]) / 2)
    tokens = difference.texts.tokens
    assert [token.divergence for token in tokens] == pytest.approx([divergence for divergence, _ in expected], abs=1e-6)
    assert [token.a != token.b for token in tokens] == [differs for _, differs in expected]
    assert difference.texts.num_different == sum(differs for _, differs in expected)
    head = next(change for change in difference.weights.changes if change.kind == "head" and change.index == 1)
    assert head.divergence == pytest.approx(float(torch.cat(rows).mean()), abs=1e-6)
    assert next(token.position for token in tokens if token.text == 1) == 0


def test_jensen_shannon_is_symmetric_and_bounded() -> None:
    first, second = torch.rand(5, 7).softmax(-1), torch.rand(5, 7).softmax(-1)
    assert torch.allclose(jensen_shannon(first, second), jensen_shannon(second, first))
    assert float(jensen_shannon(first, first).abs().max()) < 1e-12
    apart = torch.eye(3)[:2]
    assert jensen_shannon(apart, apart.flip(0)).tolist() == pytest.approx([torch.log(torch.tensor(2.0)).item()] * 2)
    # A row of zeros is all sink: as far from a row of weights as possible, and equal to another one.
    assert jensen_shannon(torch.zeros(1, 3), apart[:1]).item() == pytest.approx(0.6931, abs=1e-4)
    assert jensen_shannon(torch.zeros(1, 3), torch.zeros(1, 3)).item() == 0.0


@pytest.mark.parametrize("kind", ["translate", "classify", "several", "fill"])
def test_every_kind_of_output_is_compared(kind: str, trained: Path, runs: Callable[[str], Path]) -> None:
    run = str(trained / "run" if kind == "translate" else runs(kind))
    model = ch.load(run)
    same = ch.diff(model, run, TEXTS).texts
    assert same is not None and same.divergence == 0.0 and same.num_different == 0 and len(same.heads) >= 2
    assert len(same.tokens) == 2 if kind in ("classify", "several") else len(same.tokens) > 2
    other = ch.load(run)
    with torch.no_grad():
        for weight in other.module.parameters():
            weight.mul_(-1.0)
    changed = ch.diff(model, other, TEXTS).texts
    assert changed is not None and changed.divergence is not None and changed.divergence > 0.0


def test_a_lora_run_shows_its_rank(runs: Callable[[str], Path], tmp_path: Path) -> None:
    base = runs("generate")
    task, data = task_tables(tmp_path, "generate")
    file = tmp_path / "lora.toml"
    file.write_text(
        f'[task]\n{task}\ninit = "{base}"\n[data]\n{data}max_length = 16\n[lora]\nrank = 2\n'
        f'[train]\nrun = "{tmp_path}/lora"\nbatch_tokens = 211\nsteps = 4\nvalidate_every = 2\n',
        encoding="utf-8",
    )
    assert main(["train", str(file)]) == 0
    tensors = [
        change for change in ch.diff(str(base), str(tmp_path / "lora")).weights.changes if change.kind == "tensor"
    ]
    adapted = [
        change
        for change in tensors
        if change.address.split(".")[-2] in ("query", "key", "value", "out") and change.rank
    ]
    assert len(adapted) == 4 and {change.rank for change in adapted} == {2}
    assert {change.relative for change in tensors if change not in adapted} == {0.0}


def test_an_encoder_and_its_classifier(runs: Callable[[str], Path], tmp_path: Path) -> None:
    encoder = runs("fill")
    file = write_task(tmp_path, "classify")
    text = file.read_text(encoding="utf-8")
    # Tokenizer and sizes are those of the encoder.
    file.write_text(text[: text.index("[tokenizer]")] + text[text.index("[train]") :], encoding="utf-8")
    assert main(["train", str(file), f"task.init={encoder}", "train.steps=4", "train.validate_every=2"]) == 0
    difference = ch.diff(str(encoder), str(tmp_path / "run"), TEXTS)
    assert difference.weights.only_in_b or difference.weights.other_shape, "the heads of the two tasks differ"
    assert {change.address.partition(".")[0] for change in difference.weights.changes} >= {"encoder"}
    assert difference.texts is not None and difference.texts.heads and not difference.texts.tokens
    assert "different outputs" in difference.texts.reason
    with pytest.raises(ch.InputError, match="leave the texts out"):
        raise_code(difference)


def raise_code(difference: Difference) -> None:
    from clearhead.apps.cli.diff import _fail_above

    _fail_above(difference, 0.5)


def test_added_tokens(runs: Callable[[str], Path]) -> None:
    model = ch.load(str(runs("generate")), precision="fp32")
    grown = ch.surgery.grow_vocabulary(model, ["zzz", "yyy"]).model
    difference = ch.diff(model, grown, TEXTS)
    assert difference.largest == 0.0 and not difference.weights.only_in_a and not difference.weights.only_in_b
    rows = {tensor.common_rows for tensor in difference.weights.other_shape}
    assert rows == {model.module.num_target_ids}
    assert difference.texts is not None and difference.texts.num_different == 0
    assert difference.texts.divergence == pytest.approx(0.0, abs=1e-9)
    # The texts of the grown model are read with the tokens that both have.
    assert ch.diff(grown, model, ["zzz a"]).texts is not None


def test_fail_above_is_the_exit_code(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(trained / "run")
    capfd.readouterr()
    largest = float(str(read_json(capfd, f"{run}@step-3", run)["largest"]))
    assert main(["diff", f"{run}@step-3", run, "--fail-above", str(largest * 1.01)]) == 0
    assert main(["diff", f"{run}@step-3", run, "--fail-above", str(largest * 0.99)]) == 1
    out, err = capfd.readouterr()
    assert "the largest change of weights is" in err and "rank of B-A" in out, "the table comes first"
    # With texts the bound is that of the KL divergence, which is far smaller here.
    assert main(["diff", f"{run}@step-3", run, TEXTS[0], "--fail-above", str(largest * 100)]) == 0
    assert main(["diff", f"{run}@step-3", run, TEXTS[0], "--fail-above", "0"]) == 1
    assert "the KL divergence per token is" in capfd.readouterr().err


def test_the_page_shows_every_head_and_texts_as_text(trained: Path, tmp_path: Path, chromium: str) -> None:
    run, page = str(trained / "run"), tmp_path / "diff.html"
    lines = tmp_path / "lines.txt"
    lines.write_text("a m u\n\n<b>e</b> q y\n", encoding="utf-8")
    assert main(["diff", f"{run}@step-3", run, "--file", str(lines), "-o", str(page)]) == 0
    num_heads = sum(change.kind == "head" for change in ch.diff(f"{run}@step-3", run).weights.changes)
    with browser(chromium) as running:
        tab = running.new_page(viewport={"width": 390, "height": 844})
        errors: list[str] = []
        tab.on("console", lambda message: errors.append(message.text))
        tab.on("request", lambda request: errors.extend([] if request.url.startswith("file:") else [request.url]))
        tab.goto(page.as_uri())
        assert tab.locator(".grid td").count() == 2 * num_heads
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        assert tab.locator("ol.tokens b").count() == 0
        assert tab.locator(".grid td.share-10").count() >= 2, "the largest has the darkest colour"
        assert not errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "nowhere"], "nowhere: there is no such folder"),
        (["RUN", "RUN", "a", "--file", "LINES"], "give texts on the command line or with --file, not both"),
        (["RUN", "RUN", "--file", "EMPTY"], "there is no text; expected at least one line"),
        (["RUN", "RUN", "-o", "x.png"], "expected a page, whose name ends in .html"),
        (["RUN", "RUN", "--force"], "--force replaces the file of -o"),
        (["RUN", "RUN", "--precision", "bf16"], "are for models that read texts"),
        (["RUN", "RUN", "--fail-above", "-1"], "--fail-above expects a number of at least 0"),
        (["RUN", "GENERATE", "a"], "different stacks (encoder-decoder; decoder)"),
        (["RUN", "RUN", "a", " "], "text 2: the text is empty"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str],
    message: str,
    trained: Path,
    runs: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "EMPTY").write_text("\n", encoding="utf-8")
    (tmp_path / "LINES").write_text("a m\n", encoding="utf-8")
    places = {"RUN": str(trained / "run"), "GENERATE": str(runs("generate"))}
    places |= {name: str(tmp_path / name) for name in ("EMPTY", "LINES")}
    capfd.readouterr()
    assert main(["diff", *(places.get(word, word) for word in words)]) == 2
    err = capfd.readouterr().err
    assert message in err and err.count("\n") == 1
