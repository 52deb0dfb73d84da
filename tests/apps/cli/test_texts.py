"""The commands fill, classify, tag and embed say what the model's methods say, line by line."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import clearhead
from tests.apps.cli.test_commands import run
from tests.apps.cli.test_generate import run_refused
from tests.apps.cli.tiny_tasks import label_of

Runs = Callable[[str], Path]
TEXTS = ["a m u", "b n v", "e q y"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three texts with an empty line between the first and the second."""
    path = tmp_path / "input"
    path.write_text("".join(f"{line}\n" for line in [TEXTS[0], "", *TEXTS[1:]]), encoding="utf-8")
    return path


def lines(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    return run(capfd, *arguments).removesuffix("\n").split("\n")


# --- fill ---


def test_fill_shows_candidates_with_probabilities(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    text = "a ___ u b ___ v"
    (out,) = lines(capfd, "fill", str(runs("fill")), text, "--top-k", "3")
    first, second = clearhead.load(runs("fill")).fill([text], top_k=3)[0]
    filled, *columns = out.split("\t")
    assert filled == first[0].filled
    for column, candidates in zip(columns, (first, second), strict=True):
        assert column == "  ".join(f"{candidate.text} {candidate.probability:.4f}" for candidate in candidates)


def test_fill_json(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    text = "a ___ u"
    record = json.loads(run(capfd, "fill", str(runs("fill")), text, "--json", "--top-k", "2"))
    assert set(record) == {"index", "text", "filled", "blanks"} and record["text"] == text
    ((best, other),) = record["blanks"]
    assert set(best) == {"text", "token", "probability", "start", "end", "filled"}
    assert text[best["start"] : best["end"]] == "___" and 0 < other["probability"] <= best["probability"] < 1


def test_fill_reads_lines(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "a ___ u\n\n___ n v\n"
    (tmp_path / "blanks").write_text(content, encoding="utf-8")
    ref = str(runs("fill"))
    from_file = lines(capfd, "fill", ref, "--file", str(tmp_path / "blanks"), "--batch-size", "1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert lines(capfd, "fill", ref) == from_file
    assert len(from_file) == 3 and from_file[1] == "" and from_file[0].count("\t") == 1


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("fill", ["a m u"], "the text has no blank: write ___ or <mask>"),
        ("generate", ["a ___ u"], "this model reads from left to right"),
        ("classify", ["a ___ u"], 'train a masked model with [task] kind = "fill"'),
        ("fill", ["a ___", "--file", "f"], "TEXT and --file are two ways"),
        ("fill", ["a ___", "--batch-size", "2"], "--batch-size has no effect on a single TEXT"),
        ("fill", ["a\n___"], "TEXT is a single line"),
        ("fill", ["--file", "nowhere"], "nowhere: there is no such file"),
        ("fill", ["a ___", "--top-k", "0"], "--top-k expects a number of at least 1"),
    ],
)
def test_fill_refuses(
    kind: str, arguments: list[str], expected: str, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    assert expected in run_refused(capfd, "fill", str(runs(kind)), *arguments)


def test_a_line_without_a_blank_is_named(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blanks").write_text("a ___ u\n\na m u\n", encoding="utf-8")
    message = run_refused(capfd, "fill", str(runs("fill")), "--file", str(tmp_path / "blanks"))
    assert f"{tmp_path}/blanks:3: the text has no blank" in message


# --- classify ---


def test_classify_learned_its_labels(runs: Runs, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = lines(capfd, "classify", str(runs("classify")), str(file))
    assert output[1] == "" and len(output) == 4
    expected = clearhead.load(runs("classify")).classify(TEXTS)
    for line, text, classification in zip([output[0], *output[2:]], TEXTS, expected, strict=True):
        assert line == f"{classification.label}\t{classification.probability:.4f}" and classification.label == label_of(
            text
        )


def test_classify_json(runs: Runs, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in lines(capfd, "classify", str(runs("classify")), str(file), "--json")]
    assert records[1] == {"index": 1, "text": "", "label": None, "probability": None}
    for record in records[:1] + records[2:]:
        assert set(record["probabilities"]) == {"early", "late"}
        assert math.isclose(sum(record["probabilities"].values()), 1.0, rel_tol=1e-6)
        assert record["label"] == max(record["probabilities"], key=record["probabilities"].get)


def test_classify_pairs(runs: Runs, tmp_path: Path, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs").write_text("a m u\tu m a\n\nb n v\tv n b\n", encoding="utf-8")
    ref = str(runs("pair"))
    records = [json.loads(line) for line in lines(capfd, "classify", ref, str(tmp_path / "pairs"), "--pair", "--json")]
    expected = clearhead.load(ref).classify([("a m u", "u m a"), ("b n v", "v n b")])
    assert [record["label"] for record in records] == [expected[0].label, None, expected[1].label]
    assert records[2]["pair"] == "v n b"
    assert "add --pair" in run_refused(capfd, "classify", ref, str(file))


def test_classify_numbers_and_sets(runs: Runs, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = lines(capfd, "classify", str(runs("number")), str(file))
    values = [answer.value for answer in clearhead.load(runs("number")).classify(TEXTS)]
    assert output[1] == "" and [float(line) for line in [output[0], *output[2:]]] == pytest.approx(values, rel=1e-5)
    record = json.loads(lines(capfd, "classify", str(runs("several")), str(file), "--json")[0])
    assert set(record["labels"]) == {name for name, share in record["probabilities"].items() if share >= 0.5}


def test_an_untrained_head_never_answers(runs: Runs, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = run_refused(capfd, "classify", str(runs("fill")), str(file))
    assert "trained to 'fill'" in message and 'kind = "classify"' in message
    message = run_refused(capfd, "tag", str(runs("classify")), str(file))
    assert "trained to 'classify'" in message and 'kind = "tag"' in message
    assert 'kind = "embed"' in run_refused(capfd, "embed", str(runs("fill")), str(file))


# --- tag ---


def test_tag_says_where_entities_stand(runs: Runs, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert lines(capfd, "tag", str(runs("tag")), str(file)) == ["NAME 0-1 a", "", "NAME 0-1 b", ""]


def test_tag_json(runs: Runs, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in lines(capfd, "tag", str(runs("tag")), str(file), "--json")]
    assert [len(record["entities"]) for record in records] == [1, 0, 1, 0]
    (entity,) = records[2]["entities"]
    assert set(entity) == {"label", "text", "start", "end", "probability"}
    assert records[2]["text"][entity["start"] : entity["end"]] == entity["text"] == "b"


# --- embed ---


def test_embed_writes_an_array(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "input").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    output = tmp_path / "vectors.npy"
    ref, source = str(runs("embed")), str(tmp_path / "input")
    record = json.loads(run(capfd, "embed", ref, source, "-o", str(output), "--json", "--batch-size", "2"))
    assert record == {"file": str(output), "texts": 3, "width": 14}
    vectors = np.load(output, allow_pickle=False)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, clearhead.load(ref).embed(TEXTS), atol=1e-6)
    rows = [json.loads(line) for line in lines(capfd, "embed", ref, source)]
    np.testing.assert_allclose(rows, vectors, atol=1e-6)
    output.write_text("mine", encoding="utf-8")
    run(capfd, "embed", ref, source, "-o", str(output), "--force")
    assert (np.load(output, allow_pickle=False) == vectors).all()


@pytest.mark.parametrize("kind", ["classify", "tag", "fill"])
def test_what_is_no_vector_is_not_given_as_one(
    kind: str, runs: Runs, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The scores of a classifier once came out as the vector of a text."""
    assert 'kind = "embed"' in run_refused(capfd, "embed", str(runs(kind)), str(file))


def test_embed_json_and_pairs(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs").write_text("a m u\tu m a\n\nb n v\te q y\n", encoding="utf-8")
    ref, source = str(runs("embed")), str(tmp_path / "pairs")
    records = [json.loads(line) for line in lines(capfd, "embed", ref, source, "--pair", "--json")]
    together = clearhead.load(ref).embed([("a m u", "u m a"), ("b n v", "e q y")])
    assert records[1]["vector"] is None and records[0]["pair"] == "u m a"
    np.testing.assert_allclose([records[0]["vector"], records[2]["vector"]], together, atol=1e-6)


def test_similarity_is_the_cosine(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs").write_text("a m u\tu m a\n\nb n v\te q y\n", encoding="utf-8")
    ref, source = str(runs("embed")), str(tmp_path / "pairs")
    output = lines(capfd, "embed", ref, source, "--similarity")
    first, second = (clearhead.load(ref).embed(side) for side in (["a m u", "b n v"], ["u m a", "e q y"]))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    assert output[1] == ""
    np.testing.assert_allclose([float(output[0]), float(output[2])], cosines, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "vectors.txt"], "give a name that ends in .npy"),
        (["-o", "vectors.npy", "--similarity"], "does not end in .npy"),
        (["--pair", "--similarity"], "--pair reads both texts as one"),
        (["-o", "no-such-folder/vectors.npy"], "there is no such folder: "),
        (["-o", "no-such-folder/vectors.npy"], " has no 'no-such-folder'"),
    ],
)
def test_embed_refuses(
    arguments: list[str], expected: str, runs: Runs, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert expected in run_refused(capfd, "embed", "no-such-run", str(file), *arguments)


def test_an_empty_line_has_no_row(runs: Runs, file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "vectors.npy"
    message = run_refused(capfd, "embed", str(runs("embed")), str(file), "-o", str(output))
    assert f"{file}:2: the line is empty" in message and not output.exists()


# --- one text in Python ---


def test_one_text_has_one_answer(runs: Runs) -> None:
    text = TEXTS[0]
    model = clearhead.load(runs("classify"))
    assert model.classify(text) == model.classify([text])[0]
    pairs = clearhead.load(runs("pair"))
    assert pairs.classify((text, "u m a")) == pairs.classify([(text, "u m a")])[0]
    tagger = clearhead.load(runs("tag"))
    assert tagger.tag(text) == tagger.tag([text])[0] == tagger.tag([text.split()])[0]
    filler = clearhead.load(runs("fill"))
    assert filler.fill("a ___ u") == filler.fill(["a ___ u"])[0]
    embedder = clearhead.load(runs("embed"))
    assert embedder.embed(text).ndim == 1 and np.array_equal(embedder.embed(text), embedder.embed([text])[0])
    two = embedder.embed(("a m u", "b n v"))
    assert np.array_equal(two, embedder.embed(["a m u", "b n v"])), "a tuple is a list unless the model reads pairs"


def test_what_is_no_text_is_one_sentence(runs: Runs) -> None:
    classifier, tagger = clearhead.load(runs("classify")), clearhead.load(runs("tag"))
    with pytest.raises(
        clearhead.InputError, match="expected a text or a pair of texts, or a list of them, got NoneType"
    ):
        classifier.classify(None)
    with pytest.raises(clearhead.InputError, match=r"^text 1 is \('a', 5\); expected a text or a pair of texts$"):
        classifier.classify([("a", 5)])
    with pytest.raises(clearhead.InputError, match=r"^text 2 is \['b', 5\]; expected a text or a list of words$"):
        tagger.tag(["a", ["b", 5]])
