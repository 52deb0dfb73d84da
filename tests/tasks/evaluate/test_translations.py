"""Scores of translations agree with sacreBLEU's own command; losses with their definition."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.base.errors import InputError
from clearhead.tasks.evaluate.translations import bleu_chrf

REFERENCES = [
    "ein Mann in einem blauen Hemd steht auf einer Leiter und putzt ein Fenster .",
    "Zwei junge , weiße Männer sind im Freien .",
    "drei Hunde rennen über 1,000 Wiesen .",
]
HYPOTHESES = [
    "ein mann in einem blauen Hemd steht auf der Leiter und putzt ein Fenster .",
    "zwei junge weiße Männer sind im Freien in der Nähe .",
    "drei Hunde rennen über 1,000 grüne Wiesen .",
]


def sacrebleu_command(folder: Path, *options: str) -> list[dict[str, object]]:
    """Run the sacreBLEU command on the texts above."""
    (folder / "hypotheses").write_text("\n".join(HYPOTHESES) + "\n", encoding="utf-8")
    (folder / "references").write_text("\n".join(REFERENCES) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "hypotheses", "-m", "bleu", "chrf", "-w", "6"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, check=True, text=True)
    scores: list[dict[str, object]] = json.loads(done.stdout)
    return scores


@pytest.mark.parametrize(
    ("tokenize", "lowercase", "options"),
    [
        ("13a", False, ()),
        ("13a", True, ("-lc", "--chrf-lowercase")),
        ("none", False, ("--tokenize", "none")),
        ("none", True, ("--tokenize", "none", "-lc", "--chrf-lowercase")),
    ],
)
def test_scores_and_signatures_are_those_of_the_sacrebleu_command(
    tmp_path: Path, tokenize: str, lowercase: bool, options: tuple[str, ...]
) -> None:
    bleu, chrf = sacrebleu_command(tmp_path, *options)
    scores = bleu_chrf(HYPOTHESES, REFERENCES, tokenize=tokenize, lowercase=lowercase)
    assert scores.bleu == pytest.approx(bleu["score"], abs=1e-5)
    assert scores.chrf == pytest.approx(chrf["score"], abs=1e-5)
    assert scores.bleu_signature == bleu["signature"]
    assert scores.chrf_signature == chrf["signature"]


def test_settings_change_the_scores() -> None:
    plain = bleu_chrf(HYPOTHESES, REFERENCES)
    assert bleu_chrf(HYPOTHESES, REFERENCES, lowercase=True).bleu > plain.bleu
    assert bleu_chrf(HYPOTHESES, REFERENCES, lowercase=True).chrf > plain.chrf
    assert bleu_chrf(REFERENCES, REFERENCES).bleu == pytest.approx(100.0)


def test_faults_of_an_evaluation_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        bleu_chrf(["a", "b"], ["a", "b", "c"], tokenize="13b")
    assert all(words in str(caught.value) for words in ("2 translations but 3 references", "did you mean '13a'?"))


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to score"):
        bleu_chrf([], [])
