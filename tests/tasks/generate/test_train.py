"""Training of a language model from run file to generated text."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.core import build
from clearhead.data.batches.base import NO_LABEL
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.tasks.text_run import WORDS, parts_from, run_file

TASK = 'kind = "generate"'


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_it_learns_to_go_on(family: str, tmp_path: Path) -> None:
    path = run_file(tmp_path, TASK, family, steps=130)
    train_run(load_run_file(path), resume=False, progress=TrainingProgress())
    model = ch.load(tmp_path / "run", device="cpu")
    prompts = [" ".join(WORDS[start : start + 3]) for start in range(len(WORDS) - 4)]
    first_words = [written[0].text.split()[:1] for written in model.generate(prompts, max_new_tokens=2, temperature=0)]
    right = [words == [WORDS[start + 3]] for start, words in enumerate(first_words)]
    assert sum(right) > 0.8 * len(prompts), "chance is 4 %"


def test_the_loss_is_that_of_every_next_token(tmp_path: Path) -> None:
    parts = parts_from(run_file(tmp_path, TASK, "decoder"))
    module = build(parts.spec).eval()
    for batch in itertools.islice(parts.batches, 3):
        logits = module(batch.ids, documents=batch.documents).logits
        assert logits is not None
        expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
        loss, count = parts.loss(module, batch)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
        assert count == batch.num_labels


def test_an_untrained_model_is_as_good_as_chance(tmp_path: Path) -> None:
    parts = parts_from(run_file(tmp_path, TASK, "decoder"))
    module = build(parts.spec).eval()
    for parameter in module.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        assert parts.validate(module).loss == pytest.approx(math.log(parts.tokenizers.source.vocab_size), rel=1e-5)


def test_a_text_shorter_than_one_block_is_refused(tmp_path: Path) -> None:
    path = run_file(tmp_path, TASK, "decoder")
    (tmp_path / "train.txt").write_text("a b c d e f g\n" + " ".join("hij") + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="10 tokens, less than one block of max_length 13"):
        parts_from(path)


STREAMED = ["data.stream=true", "data.shuffle_buffer=701"]


def train_streamed(path: Path, run: Path, *overrides: str, resume: bool = False) -> dict[str, torch.Tensor]:
    """Train on a streamed text, and return the last weights."""
    changes = [f"train.run={run}", "train.save_every=9", "train.warmup=2", *STREAMED, *overrides]
    train_run(load_run_file(path, changes), resume=resume, progress=TrainingProgress())
    return dict(ch.load(f"{run}@last", device="cpu").module.state_dict())


def test_a_streamed_run_resumes_to_the_same_bits_and_keeps_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    path = run_file(tmp_path, TASK, "decoder")
    (tmp_path / "shards").mkdir()
    lines = (tmp_path / "train.txt").read_text("utf-8").splitlines(keepends=True)
    for number in range(3):
        (tmp_path / "shards" / f"{number}.txt").write_text("".join(lines[number::3]), encoding="utf-8")
    path.write_text(path.read_text("utf-8").replace("/train.txt", "/shards"), encoding="utf-8")
    whole = train_streamed(path, tmp_path / "whole", "train.steps=20")
    first = train_streamed(path, tmp_path / "parts", "train.steps=11")
    resumed = train_streamed(path, tmp_path / "parts", "train.steps=20", resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not all(torch.equal(whole[name], first[name]) for name in whole)
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 1, "the validation text alone"
    assert not (tmp_path / "cache" / "tokenizers").exists()
    with (tmp_path / "shards" / "1.txt").open("a", encoding="utf-8") as file:
        file.write("aa bb\n")
    (tmp_path / "shards" / "3.txt").write_text("aa bb\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"1\.txt has .* bytes, 6 more than before; .*3\.txt is new.*start anew"):
        train_streamed(path, tmp_path / "parts", "train.steps=29", resume=True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.shuffle_buffer=99"], "shuffle_buffer has an effect only with stream = true"),
        (
            [*STREAMED, "data.valid=0.1"],
            "valid must name a separate text, since the length of a streamed text is unknown",
        ),
        ([*STREAMED, "train.epochs=2"], "epochs counts passes, but the number of steps in a pass over a streamed text"),
        ([*STREAMED, "task.kind=fill", "model.family=encoder"], "stream has no effect for the task 'fill'"),
        ([*STREAMED, 'data.train={ dataset = "a/b", split = "train" }'], "stream works with text files only"),
    ],
)
def test_a_stream_that_cannot_be(overrides: list[str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_run_file(run_file(tmp_path, TASK, "decoder"), overrides)
    assert expected in str(caught.value)
