"""Windows, grouped heads and multi-query attention train in every family."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from clearhead import spec
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.tasks.text_run import run_file

KINDS = {
    "window": ["model.window=3"],
    "grouped": ["model.heads=4", "model.head_size=6", "model.kv_heads=2"],
    "multi_query": ["model.kv_heads=1"],
}
FAMILIES = {
    "encoder": 'kind = "fill"\nmask_share = 0.2',
    "decoder": 'kind = "generate"',
    "encoder-decoder": 'kind = "denoise"',
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains(family: str, kind: str, tmp_path: Path) -> None:
    path = run_file(tmp_path, FAMILIES[family], family, steps=60)
    loaded = load_run_file(path, KINDS[kind])
    train_run(loaded, resume=False, progress=TrainingProgress())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    model = spec.Model.from_json((tmp_path / "run" / "spec.json").read_text("utf-8"))
    attention = [node for _, node in spec.walk(model) if isinstance(node, spec.Attention) and node.source == "self"]
    assert attention
    for node in attention:
        assert isinstance(node.mask, spec.Window) == (kind == "window")
        assert node.num_heads // node.num_kv_heads == {"window": 1, "grouped": 2, "multi_query": 2}[kind]
    chance = math.log(len({*"abcdefghijklmnopqrstuvw"}))
    assert rows[-1]["valid_loss"] < 0.7 * chance
