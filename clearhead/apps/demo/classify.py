"""`clearhead demo classify`: which language is this name from?"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.apps.demo.cldr import fold_text, language_name, read_locale
from clearhead.apps.demo.common import DemoOutcome, DemoPlan, load_trained, train_recipe, write_heads_page, write_tables
from clearhead.base.commands import make_command, quote
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from clearhead.tasks.classify.use import Classification


# Related languages side by side, so that in a picture frequent confusions are near the diagonal.
LANGUAGES = (
    *("is", "da", "sv", "de", "nl", "en", "cy", "ga", "fr", "ca", "es", "pt", "it", "ro", "sq", "lt", "lv", "pl"),
    *("cs", "sk", "sl", "hr", "sr", "mk", "bg", "ru", "be", "uk", "kk", "az", "tr", "hu", "fi", "et", "eu", "id"),
    *("sw", "vi", "el", "hy", "ka", "he", "ar", "fa", "ur", "hi", "mr", "ne", "bn", "ta", "th", "ko", "zh", "ja"),
)
VALID_SHARE, TEST_SHARE = 0.08, 0.12
_LETTER = re.compile(r"[^\W\d_]")
_LATIN = re.compile(r"[A-Za-zªºÀ-ÖØ-öø-ʯḀ-ỿ]")
# What would end a cell or a line of a table.
_BREAKS = frozenset("\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029")


class Name(NamedTuple):
    """A name, the English name of the language it belongs to, and what it names, such as "territory DE"."""

    text: str
    language: str
    concept: str


@dataclass(frozen=True)
class NameSets:
    """Names split by what they name: a thing named in one part is named in no other, in no language.

    Args:
        train: names to learn from.
        valid: names for every choice, equally many of each language.
        test: names to be scored once, equally many of each language.
        languages: every language, in the order of the locales.
        latin: those of them that are written in Latin letters, in the same order.
        num_shared: how many names were left out because several of the languages have them.
    """

    train: list[Name]
    valid: list[Name]
    test: list[Name]
    languages: tuple[str, ...]
    latin: tuple[str, ...]
    num_shared: int


def make_name_sets(
    *, seed: int, valid_per_language: int, test_per_language: int, locales: Sequence[str] = LANGUAGES
) -> NameSets:
    """Read the names of many languages and split them; the same arguments give the same names.

    Args:
        seed: chooses the split and every draw.
        valid_per_language: most validation names of each language; all have as many as the one with the fewest.
        test_per_language: most test names of each language; likewise.
        locales: CLDR names of the languages, such as "de".

    Raises:
        InputError: Babel is not installed, it does not know a locale, two locales are one language, or a language
            has too few names that are its own.
    """
    tables = _own_tables(locales)
    own_names, num_shared = drop_shared_names(tables)
    latin = tuple(language for language, names in own_names.items() if is_latin(" ".join(n.text for n in names)))
    for language in set(own_names) - set(latin):
        # Such as a name left in English, which does not have the letters of the language.
        own_names[language] = [name for name in own_names[language] if not is_latin(name.text)]
    parts = split([name for names in own_names.values() for name in names], seed)
    source = random.Random(seed)
    wanted = (None, valid_per_language, test_per_language)
    train, valid, test = (
        _draw(source, candidates, own_names, count) for candidates, count in zip(parts, wanted, strict=True)
    )
    return NameSets(train, valid, test, tuple(own_names), latin, num_shared)


def read_names(locale: str) -> Iterator[tuple[str, str]]:
    """Yield (name, what it names) for everything that CLDR has a name for in one language.

    Variants of one language ("de", "de_AT") count as one thing.

    Raises:
        InputError: Babel is not installed, or it does not know the locale.
    """
    cldr = read_locale(locale)
    for code, name in cldr.languages.items():
        yield name, f"language {code.split('_')[0]}"
    for code, name in cldr.territories.items():
        yield name, f"territory {code}"
    for context in ("format", "stand-alone"):
        for number, name in cldr.months[context]["wide"].items():
            yield name, f"month {number}"
    for unit, names in cldr.unit_display_names.items():
        if "long" in names:
            yield names["long"], f"unit {unit}"


def drop_shared_names(tables: Mapping[str, Sequence[Name]]) -> tuple[dict[str, list[Name]], int]:
    """Leave out the names that several languages have, whatever they name there, and every repetition.

    Args:
        tables: the names of each language.

    Returns:
        The names that belong to one language alone, and how many were left out because they do not, each counted once.
    """
    owners: dict[str, set[str]] = {}
    for language, names in tables.items():
        for name in names:
            owners.setdefault(fold_text(name.text), set()).add(language)
    own_names: dict[str, list[Name]] = {}
    for language, names in tables.items():
        unique: dict[str, Name] = {}
        for name in names:
            key = fold_text(name.text)
            if len(owners[key]) == 1:
                unique.setdefault(key, name)
        own_names[language] = list(unique.values())
    return own_names, sum(len(languages) > 1 for languages in owners.values())


def split(names: Sequence[Name], seed: int) -> tuple[list[Name], list[Name], list[Name]]:
    """Split names by what they name into those to learn from, for validation and for the test."""
    concepts = sorted({name.concept for name in names})
    random.Random(seed).shuffle(concepts)
    num_valid, num_test = round(VALID_SHARE * len(concepts)), round(TEST_SHARE * len(concepts))
    valid, test = set(concepts[:num_valid]), set(concepts[num_valid : num_valid + num_test])
    held_out = valid | test
    return (
        [name for name in names if name.concept not in held_out],
        [name for name in names if name.concept in valid],
        [name for name in names if name.concept in test],
    )


def is_latin(text: str) -> bool:
    """Return whether most letters of a text are Latin."""
    return 2 * len(_LATIN.findall(text)) > len(_LETTER.findall(text))


def _own_tables(locales: Sequence[str]) -> dict[str, list[Name]]:
    tables: dict[str, list[Name]] = {}
    for locale in locales:
        language = language_name(locale)
        if language in tables:
            raise InputError(f"expected one locale of each language, got two of {language}; leave '{locale}' out")
        tables[language] = [Name(text, language, concept) for text, concept in _clean(read_names(locale))]
    return tables


def _clean(names: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Leave out symbols, and names that do not fit in one cell of a table."""
    for text, concept in names:
        text = unicodedata.normalize("NFC", text.strip())
        fewest = 3 if is_latin(text) else 2
        if len(_LETTER.findall(text)) >= fewest and not set(text) & _BREAKS:
            yield text, concept


def _draw(source: random.Random, names: Sequence[Name], languages: Iterable[str], most: int | None) -> list[Name]:
    """Shuffle a part; with a limit, take equally many names of each language."""
    shuffled = source.sample(names, len(names))
    counts = Counter(name.language for name in names)
    if missing := [language for language in languages if not counts[language]]:
        raise InputError(f"too few names of {missing[0]} are its own to be split into three parts; leave it out")
    if most is None:
        return shuffled
    equal = min(most, *counts.values())
    taken: Counter[str] = Counter()
    drawn: list[Name] = []
    for name in shuffled:
        if taken[name.language] < equal:
            taken[name.language] += 1
            drawn.append(name)
    return drawn


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
    files = write_tables(
        plan, {split_name: [("text", "language", "names"), *names] for split_name, names in parts.items()}
    )
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

    positions = {language: number for number, language in enumerate(sets.languages)}
    expected_N = np.array([positions[name.language] for name in sets.test])
    predicted_N = np.array([positions[label] for label in labels])
    matrix_LL = confusion_matrix(predicted_N, expected_N, num_labels=len(positions))
    draw_confusion(matrix_LL, sets.languages, plan.run / "plots" / "confusion.png", title="Which language is this?")
