"""Training of a tagger from run file to entities, and refused inputs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.tasks.labelled_run import noise, write_run_file

TASK = 'kind = "tag"'


def sentence(draw: random.Random) -> list[tuple[str, str]]:
    """A title begins a name of two words: what the second is follows from the first."""
    pairs = [(word, "O") for word in noise(draw, draw.randint(1, 5))]
    pairs += [("mr", "B-PER"), (draw.choice(["xx", "yy"]), "I-PER")] if draw.random() < 0.7 else []
    pairs += [("in", "O"), (draw.choice(["xx", "yy"]), "B-LOC")] if draw.random() < 0.7 else []
    return pairs + [(word, "O") for word in noise(draw, draw.randint(0, 3))]


def write_sentences(folder: Path, *, train: int = 240, count: int = 301) -> None:
    draw = random.Random(6)
    sentences = [sentence(draw) for _ in range(count)]
    for split, chosen in (("train", sentences[:train]), ("valid", sentences[train:])):
        text = "\n".join("".join(f"{word}\t{tag}\n" for word, tag in sentence_pairs) for sentence_pairs in chosen)
        (folder / f"{split}.conll").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_it_learns_to_find_names(tmp_path: Path, family: str) -> None:
    write_sentences(tmp_path)
    path = write_run_file(tmp_path, TASK, family, ending="conll", labels="")
    train_run(load_run_file(path), resume=False, progress=TrainingProgress())
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["valid_score"] > 90
    model = ch.load(tmp_path / "run", device="cpu")
    assert model.task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    text = "aa  mr xx in\tyy bb"
    (entities,) = model.tag([text])
    assert [(entity.label, entity.text) for entity in entities if entity.label == "PER"] == [("PER", "mr xx")]
    assert all(text[entity.start : entity.end] == entity.text and 0 < entity.probability <= 1 for entity in entities)


def test_a_share_is_held_out(tmp_path: Path) -> None:
    write_sentences(tmp_path, train=301)
    path = write_run_file(tmp_path, TASK, "encoder", ending="conll", labels="", valid="0.25", steps=3)
    train_run(load_run_file(path), resume=False, progress=TrainingProgress())
    assert (tmp_path / "run" / "task.json").is_file()


def test_a_held_out_tag_must_be_known(tmp_path: Path) -> None:
    write_sentences(tmp_path)
    with (tmp_path / "valid.conll").open("a", encoding="utf-8") as file:
        file.write("\nzz\tB-ORG\n")
    with pytest.raises(InputError, match=r'^\[data\] valid: .*valid.conll:\d+: the tag "B-ORG" is not among the 5'):
        path = write_run_file(tmp_path, TASK, "encoder", ending="conll", labels="")
        train_run(load_run_file(path), resume=False, progress=TrainingProgress())
