"""Commands that read large files as on a GPU: larger groups of lines, equal answers in order, and a bounded memory."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from clearhead.apps.cli.main import main
from clearhead.data import feed
from clearhead.tasks import outputs
from clearhead.text.tokenizer import Tokenizer
from tests.apps.cli.test_shares import Runs, write_texts

NUM_LINES = 60 * 11
BLOCK = 97


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_texts(tmp_path)
    path = tmp_path / "LARGE"
    path.write_text(((tmp_path / "FULL").read_text(encoding="utf-8") + "\n") * 11, encoding="utf-8")
    return path


@pytest.mark.parametrize(("kind", "ending"), [("embed", "npy"), ("classify", "txt")])
def test_a_large_file_is_answered_in_blocks_as_it_is_on_a_cpu(
    kind: str, ending: str, runs: Runs, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, whole = [kind, str(runs(kind)), str(file)], file.with_name(f"whole.{ending}")
    assert main([*words, "-o", str(whole)]) == 0
    blocks = list[int]()
    encode = Tokenizer.encode_batch

    def note(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        assert threading.current_thread().name in ("MainThread", "clearhead feed")
        blocks.append(len(texts))
        return encode(self, texts)

    for module in (feed, outputs):
        monkeypatch.setattr(module, "computes_late", lambda device: True)
    monkeypatch.setattr(outputs, "BLOCK", BLOCK)
    monkeypatch.setattr(Tokenizer, "encode_batch", note)
    late = file.with_name(f"late.{ending}")
    assert main([*words, "-o", str(late)]) == 0
    assert sum(blocks) == NUM_LINES and max(blocks) == BLOCK, "memory is bounded by the size of a block"
    if kind == "embed":
        vectors = np.load(late)
        assert vectors.shape[0] == NUM_LINES
        assert np.abs(vectors - np.load(whole)).max() < 1e-5
    else:
        texts = [path.read_text(encoding="utf-8").splitlines() for path in (late, whole)]
        labels = [[line.split("\t")[0] for line in lines] for lines in texts]
        assert len(labels[0]) == NUM_LINES and labels[0] == labels[1]
