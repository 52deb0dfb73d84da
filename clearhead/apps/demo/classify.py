"""`clearhead demo classify`: which language is this name from?"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.apps.demo.common import DemoOutcome, DemoPlan, load_trained, train_recipe, write_heads_page, write_tables
from clearhead.apps.demo.data.names import LANGUAGES, NameSets, make_name_sets
from clearhead.base.commands import make_command, quote

if TYPE_CHECKING:
    from clearhead.tasks.classify.use import Classification

NUM_SHOWN = 8
NUM_CONFUSIONS = 6
SAMPLE = "Neuseeland"
RECIPE = """
[task]
kind = "classify"
[data]
train = {{ text = {train}, labels = "language" }}
valid = {{ text = {valid}, labels = "language" }}
max_length = 64
[tokenizer]
kind = "character"
[model]
family = "encoder"
layers = 2
width = 96
heads = 4
feedforward = 256
activation = "silu"
gated = true
norm = "rms"
norm_place = "pre"
positions = "rotary"
dropout = 0.0
[train]
run = {run}
steps = 1000
batch_tokens = 2048
optimizer = "muon"
learning_rate = 0.01
schedule = "cosine"
warmup = 100
clip = 1.0
validate_every = 250
keep = 1
"""


@dataclass(frozen=True)
class ClassifySizes:
    """How much is held out.

    Args:
        locales: the languages, as CLDR names.
        valid_per_language: most validation names of each language.
        test_per_language: most test names of each language.
    """

    locales: Sequence[str] = LANGUAGES
    valid_per_language: int = 12
    test_per_language: int = 24


FULL = ClassifySizes()


@dataclass(frozen=True)
class Scores:
    """Accuracies on the test names, from 0 to 1.

    Args:
        accuracy: of all names; every language counts the same, as it has as many names as any other.
        latin_accuracy: of the names in languages that are written in Latin letters; None where there are none.
        per_language: of the names of each language.
    """

    accuracy: float
    latin_accuracy: float | None
    per_language: dict[str, float]


def run_classify(plan: DemoPlan, sizes: ClassifySizes = FULL) -> DemoOutcome:
    """Make the data, train, classify the test names once, and draw the confusion matrix.

    Args:
        plan: the options of every demo.
        sizes: how much is held out.

    Returns:
        The accuracy on the test names, in all, of the languages in Latin letters, and of each language.
    """
    console = plan.console
    sets = make_name_sets(
        seed=plan.seed,
        valid_per_language=sizes.valid_per_language,
        test_per_language=sizes.test_per_language,
        locales=sizes.locales,
    )
    _introduce(console, sets)
    parts = {"train": sets.train, "valid": sets.valid, "test": sets.test}
    files = write_tables(plan, {part: [("text", "language", "names"), *names] for part, names in parts.items()})
    train_recipe(RECIPE, plan, files)
    model = load_trained(plan)
    answers = model.classify([name.text for name in sets.test], batch_size=plan.batch_size)
    labels = [answer.label for answer in answers]
    scores = score(sets, labels)
    _show_some(console, sets, answers, plan.seed)
    _show_scores(console, sets, scores, labels)
    draw(sets, labels, plan)
    write_heads_page(model, SAMPLE, plan)
    ref = quote(str(plan.run))
    return DemoOutcome(
        record=asdict(scores),
        pictures={"What is taken for what": "plots/confusion.png"},
        commands={
            "Try a name of your own": f"echo '{SAMPLE}' | {make_command(f'classify {ref}')}",
            "Score it again": make_command(f"evaluate {ref} --text {quote(str(files['test']))} --labels language"),
        },
    )


def score(sets: NameSets, labels: Sequence[str]) -> Scores:
    """Return the accuracies on the test names.

    Args:
        sets: the names.
        labels: the prediction for each test name.
    """
    counts, right = Counter[str](), Counter[str]()
    for name, label in zip(sets.test, labels, strict=True):
        counts[name.language] += 1
        right[name.language] += label == name.language
    latin = sum(counts[language] for language in sets.latin)
    return Scores(
        accuracy=right.total() / counts.total(),
        latin_accuracy=sum(right[language] for language in sets.latin) / latin if latin else None,
        per_language={language: right[language] / counts[language] for language in sets.languages},
    )


def confusions(sets: NameSets, labels: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return (language, taken for, how often) for the most frequent errors, the most frequent first."""
    wrong = Counter((name.language, label) for name, label in zip(sets.test, labels, strict=True))
    pairs = sorted((-count, pair) for pair, count in wrong.items() if pair[0] != pair[1])
    return [(*pair, -count) for count, pair in pairs[:NUM_CONFUSIONS]]


def _introduce(console: Console, sets: NameSets) -> None:
    console.print(
        f"Names of languages, territories, months and units in {len(sets.languages)} languages: {len(sets.train):,} to "
        f"learn from, {len(sets.valid):,} for validation, {len(sets.test):,} for the test, of things that are named "
        f"nowhere else. Left out: {sets.num_shared:,} names that several languages share."
    )


def _show_some(console: Console, sets: NameSets, answers: Sequence[Classification], seed: int) -> None:
    """Show the predictions for a few random test names."""
    table = Table(title="\nNames the model never saw", box=SIMPLE_HEAD, title_justify="left")
    for title in ("name", "language", "first guess", "second", "third"):
        table.add_column(title)
    pairs = list(zip(sets.test, answers, strict=True))
    languages = random.Random(seed).sample(sets.languages, min(NUM_SHOWN, len(sets.languages)))
    for language in languages:
        name, answer = next(pair for pair in pairs if pair[0].language == language)
        best = sorted(answer.probabilities.items(), key=lambda item: -item[1])[:3]
        cells = [f"{escape(label)} [dim]{100 * probability:.0f} %[/dim]" for label, probability in best]
        colour = "green" if answer.label == language else "red"
        table.add_row(escape(name.text), language, f"[{colour}]{cells[0]}[/{colour}]", *cells[1:])
    console.print(table)


def _show_scores(console: Console, sets: NameSets, scores: Scores, labels: Sequence[str]) -> None:
    latin = ""
    if scores.latin_accuracy is not None:
        latin = f"; of those in the {len(sets.latin)} languages written in Latin letters, "
        latin += f"[bold]{100 * scores.latin_accuracy:.1f} %[/bold]"
    console.print(
        f"Recognised: [bold]{100 * scores.accuracy:.1f} %[/bold] of {len(sets.test):,} unseen names{latin}; guessing "
        f"would give {100 / len(sets.languages):.1f} %."
    )
    if pairs := confusions(sets, labels):
        listed = ", ".join(f"{language} for {label} ({count})" for language, label, count in pairs)
        console.print(f"Most often mistaken: {listed}.", markup=False)


def draw(sets: NameSets, labels: Sequence[str], plan: DemoPlan) -> None:
    """Draw the confusion matrix of the languages, related languages side by side."""
    import numpy as np

    from clearhead.interpret.view.confusion import draw_confusion
    from clearhead.tasks.evaluate.metrics import confusion_matrix

    place = {language: number for number, language in enumerate(sets.languages)}
    expected_N = np.array([place[name.language] for name in sets.test])
    predicted_N = np.array([place[label] for label in labels])
    matrix_LL = confusion_matrix(predicted_N, expected_N, num_labels=len(place))
    draw_confusion(matrix_LL, sets.languages, plan.run / "plots" / "confusion.png", title="Which language is this?")
