"""The baseline of retrieval: a text is the mean of its words, and the table of results has a row for each model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from clearhead.data.arrays import pack
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.examples.test_run_files import script
from tests.tasks.embed.test_train import run_file


def test_a_text_is_the_mean_of_its_words() -> None:
    module = script("retrieval_baseline").AveragedEmbeddings(11, 5)
    texts = [[1, 2, 3], [4], [3, 1, 2], [7, 7, 8, 9, 10]]
    table = module.weight.detach().numpy()
    expected = np.stack([table[text].mean(0) for text in texts])
    ids, mask = torch.zeros(4, 5, dtype=torch.long), torch.zeros(4, 5, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), True
    np.testing.assert_allclose(module.of_batch(ids, mask).detach().numpy(), expected, rtol=1e-5)
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(module.of_side(pack(texts, np.dtype(np.uint16))), unit, rtol=1e-5)


@pytest.mark.usefixtures("quick_trainings")
def test_it_compares_a_run_with_both_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_run(load_run_file(run_file(tmp_path), ["train.steps=2"]), resume=False, progress=TrainingProgress())
    scores = script("retrieval_baseline").compare(tmp_path / "run", tmp_path / "valid.a", tmp_path / "valid.b", 3)
    baselines = ["averaged co-occurrence", "averaged words", "averaged tokens of the run"]
    assert list(scores) == ["by chance", *baselines, str(tmp_path / "run")]
    assert capsys.readouterr().out.count("validation recall@1") == 6
    for name in baselines:
        assert scores[name].mean > 0.1, "the order of words carries nothing here, so means of words find much"
