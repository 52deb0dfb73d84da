"""`clearhead demo translate`: an encoder-decoder turns dates in many languages into ISO dates."""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.apps.demo.cldr import fold_text, language_name, read_locale
from clearhead.apps.demo.common import DemoOutcome, DemoPlan, load_trained, train_recipe, write_heads_page, write_tables
from clearhead.base.commands import make_command, quote
from clearhead.base.errors import InputError
from clearhead.base.progress import message

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.interpret.maps.attention_maps import AttentionMaps
    from clearhead.model.facade import Model


FIRST_YEAR, LAST_YEAR = 1900, 2099
STYLES = ("full", "long", "medium")
LOCALES = (
    *("af", "ar_EG", "az", "be", "bg", "bn", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "eu", "fa", "fi"),
    *("fr", "ga", "gl", "he", "hi", "hr", "hu", "hy", "id", "is", "it", "ja", "ka", "kk", "ko", "lt", "lv", "mk"),
    *("mr", "my", "nb", "ne", "nl", "pl", "pt", "ro", "ru", "sk", "sl", "sr", "sv", "sw", "ta", "th", "tr", "uk"),
    *("ur", "uz", "vi", "zh"),
)
# The digit zero of each default numbering system in CLDR; the other nine digits follow it in Unicode.
ZEROS = {
    "latn": "0",
    "arab": "\u0660",
    "arabext": "\u06f0",
    "beng": "\u09e6",
    "deva": "\u0966",
    "mymr": "\u1040",
    "olck": "\u1c50",
    "tibt": "\u0f20",
}
_ROOT_WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

_Day: TypeAlias = tuple[int, int]  # month and day
_Texts: TypeAlias = Sequence[tuple[str, _Day]]


class DatePair(NamedTuple):
    """A date as written in a locale, its ISO form, and the name of the locale."""

    source: str
    target: str
    locale: str


@dataclass(frozen=True)
class DateSets:
    """Pairs of a date text and its ISO form in three sets; all pairs with the same date are in one set.

    Args:
        train: the training set.
        valid: the validation set.
        test: the test set.
        dropped: the reason for each date style that was left out, by (locale, style).
    """

    train: list[DatePair]
    valid: list[DatePair]
    test: list[DatePair]
    dropped: dict[tuple[str, str], str]


@dataclass(frozen=True)
class DateStyle:
    """Format in which a locale writes dates: a row of tables, each indexed by one component of the date.

    Args:
        locale: the CLDR name, such as "de" or "ar_EG".
        style: the style, "full", "long" or "medium".
        parts: the pairs (axis, table) in the order of writing; axis 0 is fixed text, 1 year, 2 month, 3 day, 4 weekday.
    """

    locale: str
    style: str
    parts: tuple[tuple[int, tuple[str, ...]], ...]

    def write(self, date: datetime.date) -> str:
        """Return a date in this style, with a Gregorian year of four digits."""
        return "".join(self._row(date))

    def every_day(self) -> Iterator[tuple[str, _Day]]:
        """Yield (text, (month, day)) for each day of a leap year, with every weekday if the style shows weekdays."""
        weekday_index = next((n for n, (axis, _) in enumerate(self.parts) if axis == 4), None)
        for n in range(366):
            date = datetime.date(2000, 1, 1) + datetime.timedelta(n)
            row = self._row(date)
            before, after = (
                "".join(row[:weekday_index]),
                "" if weekday_index is None else "".join(row[weekday_index + 1 :]),
            )
            for weekday in ("",) if weekday_index is None else self.parts[weekday_index][1]:
                yield before + weekday + after, (date.month, date.day)

    def _row(self, date: datetime.date) -> list[str]:
        index = (0, date.year - FIRST_YEAR, date.month - 1, date.day - 1, date.weekday())
        return [table[index[axis]] for axis, table in self.parts]

    def fold(self) -> DateStyle:
        """Return the style with normalized texts, for comparison."""
        parts = [(axis, tuple(fold_text(text) for text in table)) for axis, table in self.parts]
        return DateStyle(self.locale, self.style, tuple(parts))


def date_styles(locales: Sequence[str] = LOCALES) -> tuple[list[DateStyle], dict[tuple[str, str], str]]:
    """Read all date styles of the locales, and drop those that are ambiguous or incomplete.

    A style is dropped if CLDR lacks a name (and has a placeholder such as "M03"), or if it does not show the whole
    date. It is also dropped if one of its texts means another date in an earlier style.

    Args:
        locales: the CLDR names; of two clashing styles, the first one stays.

    Returns:
        The styles in order, and the reason for each dropped style by (locale, style).

    Raises:
        InputError: Babel is not installed, or it does not know a locale.
    """
    usable: list[DateStyle] = []
    dropped: dict[tuple[str, str], str] = {}
    meanings: dict[str, tuple[_Day, DateStyle]] = {}
    for style in (_read_style(locale, name) for locale in locales for name in STYLES):
        texts = list(style.fold().every_day())
        if reason := _unsound(style, texts) or _clash(style, texts, meanings):
            dropped[style.locale, style.style] = reason
        else:
            usable.append(style)
    return usable, dropped


def make_date_sets(
    *,
    seed: int,
    train_size: int,
    valid_per_locale: int,
    test_per_locale: int,
    locales: Sequence[str] = LOCALES,
) -> DateSets:
    """Return pairs of dates from 1900 to 2099 in many languages, split by date; equal arguments give equal pairs.

    Args:
        seed: the seed of the split and of all draws.
        train_size: the number of training pairs, spread evenly over the locales; a locale repeats no pair.
        valid_per_locale: the number of validation pairs per locale.
        test_per_locale: the number of test pairs per locale.
        locales: the CLDR names, such as "de" or "ar_EG".

    Raises:
        InputError: Babel is not installed, a locale is unknown, no style of a locale can be used, or a text has two
            meanings.
    """
    styles, dropped = date_styles(locales)
    by_locale = {locale: [style for style in styles if style.locale == locale] for locale in locales}
    empty = [locale for locale, of_locale in by_locale.items() if not of_locale]
    if empty:
        raise InputError(
            f"no date style can be used for the locales {empty}: {dropped[empty[0], 'full']}; leave them out"
        )
    source = random.Random(seed)
    first = datetime.date(FIRST_YEAR, 1, 1)
    days = [first + datetime.timedelta(n) for n in range((datetime.date(LAST_YEAR, 12, 31) - first).days + 1)]
    source.shuffle(days)
    tenth = len(days) // 10
    sizes = _shares(train_size, len(by_locale)), [valid_per_locale] * len(by_locale), [test_per_locale] * len(by_locale)
    parts = days[2 * tenth :], days[:tenth], days[tenth : 2 * tenth]
    train, valid, test = (
        _draw(source, split_days, by_locale, counts) for split_days, counts in zip(parts, sizes, strict=True)
    )
    check_meanings([*train, *valid, *test])
    return DateSets(train, valid, test, dropped)


def check_meanings(pairs: Iterable[DatePair]) -> None:
    """Raise an InputError if a text means two dates."""
    meanings: dict[str, DatePair] = {}
    for pair in pairs:
        other = meanings.setdefault(pair.source, pair)
        if other.target != pair.target:
            raise InputError(
                f"'{pair.source}' means {other.target} in {other.locale} and {pair.target} in {pair.locale}: "
                "a text must mean one date; leave one of the locales out"
            )


def _draw(
    source: random.Random, days: Sequence[datetime.date], by_locale: dict[str, list[DateStyle]], counts: Sequence[int]
) -> list[DatePair]:
    pairs: list[DatePair] = []
    for count, (locale, styles) in zip(counts, by_locale.items(), strict=True):
        if count > len(days) // 2:
            raise InputError(
                f"expected at most {len(days) // 2} pairs per locale in this set, got {count}: ask for fewer"
            )
        drawn: dict[str, DatePair] = {}
        while len(drawn) < count:
            day = source.choice(days)
            text = source.choice(styles).write(day)
            drawn[text] = DatePair(text, day.isoformat(), locale)
        pairs += drawn.values()
    source.shuffle(pairs)
    return pairs


def _shares(total: int, count: int) -> list[int]:
    whole, rest = divmod(total, count)
    return [whole + (n < rest) for n in range(count)]


def _axes() -> dict[str, tuple[int, Sequence[datetime.date]]]:
    """Return the axis for each letter of a CLDR pattern, with one date for each index of the axis."""
    # weekday() counts from Monday, and the first of January 1900 was one; 2000 has every day of every month.
    return {
        **dict.fromkeys("yu", (1, [datetime.date(year, 1, 1) for year in range(FIRST_YEAR, LAST_YEAR + 1)])),
        **dict.fromkeys("ML", (2, [datetime.date(2000, month, 1) for month in range(1, 13)])),
        "d": (3, [datetime.date(2000, 1, day) for day in range(1, 32)]),
        **dict.fromkeys("Eec", (4, [datetime.date(1900, 1, day) for day in range(1, 8)])),
        "G": (0, [datetime.date(2000, 1, 1)]),
    }


def _read_style(locale: str, style: str) -> DateStyle:
    cldr = read_locale(locale)
    from babel import dates

    system = cldr.default_numbering_system
    if system not in ZEROS:
        raise InputError(f"the digits of the locale '{locale}' ('{system}') are not supported: leave this locale out")
    digits = str.maketrans({str(n): chr(ord(ZEROS[system]) + n) for n in range(10)})
    axes = _axes()
    parts: list[tuple[int, tuple[str, ...]]] = []
    for _, value in dates.tokenize_pattern(cldr.date_formats[style].pattern):
        if isinstance(value, str):
            parts.append((0, (value,)))
            continue
        letter, length = value
        if letter not in axes:
            raise InputError(
                f"the {style} date format of '{locale}' has the unsupported field '{letter}': leave the locale out"
            )
        axis, days = axes[letter]
        field = letter if axis == 1 else letter * length  # a year in two digits would lose its century
        texts = [dates.DateTimeFormat(day, cldr)[field] for day in days]
        parts.append((axis, tuple(text.translate(digits) if text.isdecimal() else text for text in texts)))
    return DateStyle(locale, style, tuple(parts))


def _unsound(style: DateStyle, texts: _Texts) -> str:
    """Return the reason why a date style of a locale cannot be used, or an empty string if it can."""
    axes = [axis for axis, _ in style.parts]
    if any(axes.count(axis) != 1 for axis in (1, 2, 3)):
        return "it does not show year, month and day once each"
    if any(re.fullmatch(r"M\d\d", text) for axis, table in style.parts if axis == 2 for text in table):
        return "CLDR has no month names for it"
    if not style.locale.startswith("en") and (4, _ROOT_WEEKDAYS) in style.parts:
        return "CLDR has no weekday names for it"
    # Then the four digits in a row are the year, so texts of different years are never equal.
    if any(re.search(r"\d", text) for axis, table in style.parts if axis == 4 for text in table):
        return "its weekdays have digits"
    for text, _ in texts[:: len(texts) // 366]:
        runs = [len(run) for run in re.findall(r"\d+", text)]
        if max(runs) > 4 or runs.count(4) != 1:
            return f"the year cannot be told from the other digits of '{text}'"
    return ""


def _clash(style: DateStyle, texts: _Texts, meanings: dict[str, tuple[_Day, DateStyle]]) -> str:
    """Return a message about a text with two meanings; if there is none, record the style and return ""."""
    texts_of_style: dict[str, tuple[_Day, DateStyle]] = {}
    for text, day in texts:
        other, owner = texts_of_style.get(text) or meanings.get(text) or (day, style)
        if other != day:
            return f"'{text}' has month and day {day} here and {other} in {owner.locale} {owner.style}"
        texts_of_style[text] = day, style
    meanings.update(texts_of_style)
    return ""


SAMPLE = "Montag, 5. Januar 1998"
SHOWN = ("de", "ar_EG", "ru", "ja", "bn", "el", "ko", "my", "th", "fr")
PICTURED = ("de", "el", "hu", "ru")
RECIPE = """
[task]
kind = "translate"
[data]
train = {{ tsv = {train} }}
valid = {{ tsv = {valid} }}
max_length = 64
[tokenizer]
kind = "character"
joint = false
[model]
layers = 2
width = 64
heads = 4
feedforward = 128
norm_place = "pre"
positions = "rotary"
dropout = 0.0
tie = "none"
[train]
run = {run}
steps = 1000
batch_tokens = 2600
optimizer = "muon"
learning_rate = 0.012
schedule = "cosine"
warmup = 100
clip = 1.0
validate_every = 200
bleu_sentences = 0
keep = 6                        # for clearhead view --checkpoints: how its heads formed
"""


@dataclass(frozen=True)
class TranslateSizes:
    """Sizes of the data.

    Args:
        locales: the CLDR names of the languages.
        train_size: the number of training pairs.
        valid_per_locale: the number of validation pairs per locale.
        test_per_locale: the number of test pairs per locale.
    """

    locales: Sequence[str] = LOCALES
    train_size: int = 100_000
    valid_per_locale: int = 20
    test_per_locale: int = 100


FULL = TranslateSizes()


def run_translate(plan: DemoPlan, sizes: TranslateSizes = FULL) -> DemoOutcome:
    """Make the data, train, show samples, score the test pairs once and draw the alignment picture.

    Args:
        plan: the options of every demo.
        sizes: the sizes of the data.

    Returns:
        The share of test dates that are exactly right, overall and per locale.
    """
    console = plan.console
    sets = make_date_sets(
        seed=plan.seed,
        train_size=sizes.train_size,
        valid_per_locale=sizes.valid_per_locale,
        test_per_locale=sizes.test_per_locale,
        locales=sizes.locales,
    )
    _introduce(plan, sets, sizes.locales)
    files = write_tables(plan, {"train": sets.train, "valid": sets.valid, "test": sets.test})
    train_recipe(RECIPE, plan, files)
    model = load_trained(plan)
    console.print("\nDates that were in no training pair:")
    for pair in _samples(sets.test, sizes.locales):
        _show_sample(console, pair, model.translate([pair.source], beam_size=1)[0])
    written = model.translate([pair.source for pair in sets.test], beam_size=1, batch_size=plan.batch_size or 512)
    exact = exact_match(sets.test, written)
    console.print(score_table(exact, len(sets.test)))
    draw_attention(model, sets.test[0], plan, sizes.locales)
    write_heads_page(model, SAMPLE, plan)
    return DemoOutcome(
        record={"exact_match": sum(exact.values()) / len(exact), "per_locale": exact},
        pictures={"Attention": "plots/alignment.png"},
        commands={"Try your own date": f"echo '{SAMPLE}' | {make_command(f'translate {quote(str(plan.run))}')}"},
    )


def exact_match(pairs: Sequence[DatePair], written: Sequence[str]) -> dict[str, float]:
    """Return the share of texts that equal their target, by locale in alphabetical order."""
    right: dict[str, list[bool]] = {locale: [] for locale in sorted({pair.locale for pair in pairs})}
    for pair, text in zip(pairs, written, strict=True):
        right[pair.locale].append(text == pair.target)
    return {locale: sum(marks) / len(marks) for locale, marks in right.items()}


def score_table(exact: Mapping[str, float], count: int) -> Table:
    """Return a table of the exact matches, two locales in a row."""
    table = Table(
        title=f"\nExact match on {count:,} unseen dates", box=SIMPLE_HEAD, title_justify="left", caption_justify="left"
    )
    for _ in range(2):
        table.add_column("locale")
        table.add_column("language")
        table.add_column("exact", justify="right")
    cells = [(locale, language_name(locale), f"{100 * share:.1f} %") for locale, share in exact.items()]
    half = (len(cells) + 1) // 2
    for left, right in zip(cells[:half], [*cells[half:], ("", "", "")], strict=False):
        table.add_row(*left, *right)
    lowest = min(exact, key=lambda locale: exact[locale])
    below = f"; lowest: {lowest} {100 * exact[lowest]:.1f} %" if exact[lowest] < 1 else ""
    table.caption = f"all locales: {100 * sum(exact.values()) / len(exact):.2f} %{below}"
    return table


def _introduce(plan: DemoPlan, sets: DateSets, locales: Sequence[str]) -> None:
    sizes = (
        f"{len(sets.train):,} pairs to learn from, {len(sets.valid):,} for validation, {len(sets.test):,} for the test"
    )
    plan.console.print(f"Dates in {len(locales)} languages, to be written as year-month-day: {sizes}.")
    for pair in _samples(sets.train, locales)[:4]:
        plan.console.print(f"  {pair.locale:6} {pair.target}  {escape(pair.source)}")
    for (locale, style), reason in sets.dropped.items():
        message(f"the {style} date format of {locale} is left out: {reason}")


def _samples(pairs: Sequence[DatePair], locales: Sequence[str]) -> list[DatePair]:
    """Return a long date for several locales with different scripts and digits."""
    chosen = [locale for locale in SHOWN if locale in locales] or locales[:5]
    few = ([pair for pair in pairs if pair.locale == locale][:10] for locale in chosen)
    return [max(group, key=lambda pair: len(pair.source)) for group in few]


def _show_sample(console: Console, pair: DatePair, text: str) -> None:
    mark = "[green]✓[/green]" if text == pair.target else f"[red]✗ not {pair.target}[/red]"
    console.print(f"  {pair.locale:6} [bold]{escape(text):10}[/bold] {mark}  {escape(pair.source)}")


def _mean_over_heads(maps: AttentionMaps) -> Tensor:
    """Return the cross-attention weights, averaged over heads, [layers, queries, keys]."""
    import torch

    layers = maps.layers("decoder.memory")
    return torch.stack([maps.weights("decoder.memory", layer) for layer in layers]).mean(1)


def draw_attention(model: Model, pair: DatePair, plan: DemoPlan, locales: Sequence[str]) -> None:
    """Draw the cross-attention for one unseen date in up to four languages that the font supports."""
    import torch

    from clearhead.base.figures import drawable, label_text
    from clearhead.interpret.maps.token_texts import label_tokens
    from clearhead.interpret.view.alignment import AlignmentHeatMap, draw_alignments

    when = datetime.date.fromisoformat(pair.target)
    styles, _ = date_styles([locale for locale in locales if locale in PICTURED] or locales[:1])
    texts = list(filter(drawable, (style.write(when) for style in styles if style.style == "full")))
    if not texts:
        return
    runs = list(map(model.attention, texts))
    weights = list(map(_mean_over_heads, runs))
    # Use one layer for all: the one whose averaged heads have the sharpest attention.
    layer = int(torch.stack([layers_QK.amax(-1).mean(-1) for layers_QK in weights]).mean(0).argmax())
    alignments = []
    for text, maps, layers_QK in zip(texts, runs, weights, strict=True):
        source, target = model.tokenizers.source, model.tokenizers.target
        read, labels = maps.inputs.source.ids[0].tolist(), maps.inputs.labels
        columns, written = (
            [label_text(token, longest=12) for token in label_tokens(tokenizer, ids)]
            for tokenizer, ids in ((source, read), (target, labels))
        )
        name = f"{text} → {target.decode(labels)}"
        alignments.append(AlignmentHeatMap(layers_QK[layer].numpy(), columns, written, name))
    where = f"layer {layer}, mean of {runs[0].num_heads('decoder.memory', layer)} heads"
    title = f"Where the decoder looks while it writes a date ({where})"
    draw_alignments(alignments, plan.run / "plots" / "alignment.png", title=title)
