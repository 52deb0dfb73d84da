"""`clearhead demo classify`: an encoder recognizes the language of a name."""

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


# Related languages are neighbours, so that frequent confusions are near the diagonal of the picture.
LANGUAGES = (
    *("is", "da", "sv", "de", "nl", "en", "cy", "ga", "fr", "ca", "es", "pt", "it", "ro", "sq", "lt", "lv", "pl"),
    *("cs", "sk", "sl", "hr", "sr", "mk", "bg", "ru", "be", "uk", "kk", "az", "tr", "hu", "fi", "et", "eu", "id"),
    *("sw", "vi", "el", "hy", "ka", "he", "ar", "fa", "ur", "hi", "mr", "ne", "bn", "ta", "th", "ko", "zh", "ja"),
)
VALID_SHARE, TEST_SHARE = 0.08, 0.12
_LETTER = re.compile(r"[^\W\d_]")
_LATIN = re.compile(r"[A-Za-zªºÀ-ÖØ-öø-ʯḀ-ỿ]")
# Characters that would end a cell or a line of a table.
_BREAKS = frozenset("\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029")


class Name(NamedTuple):
    """A name, the English name of its language, and the concept that it names, such as "territory DE"."""

    text: str
    language: str
    concept: str


@dataclass(frozen=True)
class NameSets:
    """Names of concepts, such as territories; all names of a concept, in every language, are in one set.

    Args:
        train: the training set.
        valid: the validation set, with the same number of names per language.
        test: the test set, with the same number of names per language.
        languages: all languages, in the order of the `locales` that were read.
        latin: the languages written in Latin letters, in the same order.
        num_shared: the number of names that were left out because several languages have them.
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
    """Read names in many languages and split them; equal arguments give equal sets.

    Args:
        seed: the seed of the split and of all draws.
        valid_per_language: the maximum number of validation names per language; all languages have the same number.
        test_per_language: the maximum number of test names per language; all languages have the same number.
        locales: the CLDR names of the languages, such as "de".

    Raises:
        InputError: Babel is not installed, a locale is unknown, or two locales are one language. Also if a language
            has too few names that no other language has.
    """
    tables = _own_tables(locales)
    own_names, num_shared = drop_shared_names(tables)
    latin = tuple(language for language, names in own_names.items() if is_latin(" ".join(n.text for n in names)))
    for language in set(own_names) - set(latin):
        # Drop names in the wrong script, such as a name left in English.
        own_names[language] = [name for name in own_names[language] if not is_latin(name.text)]
    parts = split([name for names in own_names.values() for name in names], seed)
    source = random.Random(seed)
    wanted = (None, valid_per_language, test_per_language)
    train, valid, test = (
        _draw(source, candidates, own_names, count) for candidates, count in zip(parts, wanted, strict=True)
    )
    return NameSets(train, valid, test, tuple(own_names), latin, num_shared)


def read_names(locale: str) -> Iterator[tuple[str, str]]:
    """Yield (name, concept) for all names of one language in CLDR.

    Variants of a language ("de", "de_AT") are one concept.

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
    """Drop names that several languages have, and repeated names.

    Args:
        tables: the names of each language.

    Returns:
        The names that only one language has, and the number of different names that were dropped.
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
    """Split names into training, validation and test names; all names of a concept are in one of the three."""
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
            raise InputError(f"expected one locale of each language, got two of {language}: leave '{locale}' out")
        tables[language] = [Name(text, language, concept) for text, concept in _clean(read_names(locale))]
    return tables


def _clean(names: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield normalized names, without symbols and without names that do not fit into a cell of a table."""
    for text, concept in names:
        text = unicodedata.normalize("NFC", text.strip())
        fewest = 3 if is_latin(text) else 2
        if len(_LETTER.findall(text)) >= fewest and not set(text) & _BREAKS:
            yield text, concept


def _draw(source: random.Random, names: Sequence[Name], languages: Iterable[str], most: int | None) -> list[Name]:
    """Return the names in random order; with a limit `most`, the same number of names for each language."""
    shuffled = source.sample(names, len(names))
    counts = Counter(name.language for name in names)
    if missing := [language for language in languages if not counts[language]]:
        raise InputError(f"too few names occur only in {missing[0]} for three sets of names: leave this language out")
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
    """Sizes of the validation and test sets.

    Args:
        locales: the CLDR names of the languages.
        valid_per_language: the maximum number of validation names per language.
        test_per_language: the maximum number of test names per language.
    """

    locales: Sequence[str] = LANGUAGES
    valid_per_language: int = 12
    test_per_language: int = 24


FULL = ClassifySizes()


@dataclass(frozen=True)
class Scores:
    """Accuracies on the test names, from 0 to 1.

    Args:
        accuracy: the accuracy on all names; every language has the same number of names.
        latin_accuracy: the accuracy on names of languages in Latin letters. None means that there are none.
        per_language: the accuracy on the names of each language.
    """

    accuracy: float
    latin_accuracy: float | None
    per_language: dict[str, float]


def run_classify(plan: DemoPlan, sizes: ClassifySizes = FULL) -> DemoOutcome:
    """Make the data, train, classify the test names once, and draw the confusion matrix.

    Args:
        plan: the options of every demo.
        sizes: the sizes of the validation and test sets.

    Returns:
        The accuracies on the test names: overall, for languages in Latin letters, and for each language.
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
        pictures={"Languages that the model confuses": "plots/confusion.png"},
        commands={
            "Try another name": f"echo '{SAMPLE}' | {make_command(f'classify {ref}')}",
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
    """Return (language, predicted language, count) of the most frequent errors, the most frequent first."""
    wrong = Counter((name.language, label) for name, label in zip(sets.test, labels, strict=True))
    pairs = sorted((-count, pair) for pair, count in wrong.items() if pair[0] != pair[1])
    return [(*pair, -count) for count, pair in pairs[:NUM_CONFUSIONS]]


def _introduce(console: Console, sets: NameSets) -> None:
    console.print(
        f"Names of languages, territories, months and units in {len(sets.languages)} languages: {len(sets.train):,} to "
        f"learn from, {len(sets.valid):,} for validation, {len(sets.test):,} for the test. No concept is in two sets. "
        f"Left out: {sets.num_shared:,} names that several languages share."
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
