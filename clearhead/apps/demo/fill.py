"""`clearhead demo fill`: a masked language model of Python's standard library fills blanks in code."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from clearhead.apps.demo.common import DemoOutcome, DemoPlan, load_trained, train_on_library, write_heads_page
from clearhead.base.commands import make_command, quote

if TYPE_CHECKING:
    from clearhead.model.facade import Model
    from clearhead.tasks.fill.use import Filled

BLANK = "___"
PLACES = ("first", "second", "third")
LINES = (
    f"for i in {BLANK}(10):",
    f"import {BLANK}",
    f"def __init__({BLANK}, name):",
    f"if name is not {BLANK}:",
    f"while {BLANK}:",
    f"with open(path) {BLANK} file:",
    f"except {BLANK} as error:",
    f"raise {BLANK}('expected a string')",
    f"if {BLANK}(value, str):",
    f"return ''.{BLANK}(parts)",
)
WORD = re.compile(r"(?<!\w)[A-Za-z]{2,}(?!\w)")
# Minimum and maximum characters of a paragraph: enough context, and short enough for the model.
SHORTEST, LONGEST = 60, 300
RECIPE = """
[task]
kind = "fill"
mask_share = 0.3
[data]
train = {{ text = {train}, pattern = "*.py", document = "paragraph" }}
valid = {{ text = {valid}, pattern = "*.py", document = "paragraph" }}
max_length = 128
[tokenizer]
kind = "byte-bpe"
vocab_size = 4096
[model]
family = "encoder"
layers = 3
width = 128
heads = 4
feedforward = 352
activation = "silu"
gated = true
norm = "rms"
norm_place = "pre"
positions = "rotary"
qk_norm = true
bias = false
dropout = 0.0
[train]
run = {run}
steps = 650
batch_tokens = 1024
optimizer = "muon"
learning_rate = 0.01
schedule = "cosine"
warmup = 65
clip = 1.0
validate_every = 325
keep = 1
"""


@dataclass(frozen=True)
class FillSizes:
    """Sizes of the data.

    Args:
        max_bytes: the maximum total size of the training files in bytes.
        max_valid_bytes: the maximum total size of the held-out files in bytes.
        num_questions: the maximum number of words to blank in the held-out files.
        folder: the folder of the sources. None means the library folder of this Python.
    """

    max_bytes: int = 4_000_000
    max_valid_bytes: int = 100_000
    num_questions: int = 500
    folder: Path | None = None


FULL = FillSizes()


class Question(NamedTuple):
    """A text with one blank, and the blanked word."""

    text: str
    word: str


def run_fill(plan: DemoPlan, sizes: FillSizes = FULL) -> DemoOutcome:
    """Collect the sources, train, and fill blanks in a few lines and in the held-out files.

    Args:
        plan: the options of every demo.
        sizes: the sizes of the data.

    Returns:
        The share of blanked words that were the first candidate, or among the first three, and the candidates for the
        fixed lines.
    """
    console = plan.console
    sources = train_on_library(
        RECIPE, plan, max_bytes=sizes.max_bytes, max_valid_bytes=sizes.max_valid_bytes, folder=sizes.folder
    )
    model = load_trained(plan)
    answers = [blanks[0] for blanks in model.fill(list(LINES), top_k=len(PLACES))]
    console.print(answer_table(LINES, answers))
    questions = blank_words(model, [file.text for file in sources.valid], plan.seed, sizes.num_questions)
    shares = places_of_the_right_word(model, questions, plan.batch_size)
    word, share = commonest_word(questions)
    console.print(
        f"One word is blanked in each of {len(questions)} held-out paragraphs: "
        f"[bold]{100 * shares[0]:.0f} %[/bold] are the first candidate, {100 * sum(shares):.0f} % are among the first "
        f"{len(PLACES)}. Always '{word}' would be right for {100 * share:.0f} %."
    )
    write_heads_page(model, LINES[0], plan)
    lines = {
        line: [{"text": candidate.text, "probability": candidate.probability} for candidate in candidates]
        for line, candidates in zip(LINES, answers, strict=True)
    }
    return DemoOutcome(
        record={"first": shares[0], "among_three": sum(shares), "always_one_word": share, "lines": lines},
        pictures={},
        commands={"Ask it yourself": make_command(f"fill {quote(str(plan.run))} 'print({BLANK})'")},
    )


def answer_table(lines: Sequence[str], answers: Sequence[Sequence[Filled]]) -> Table:
    """Return a table of lines with a blank and the candidates for it, best first."""
    table = Table(title="\nWhat fills the blank?", box=SIMPLE_HEAD, title_justify="left")
    for name in ("line", *PLACES[: max(map(len, answers))]):
        table.add_column(name)
    for line, candidates in zip(lines, answers, strict=True):
        cells = [
            f"{escape(_visible(candidate.text))} [dim]{100 * candidate.probability:.0f} %[/dim]"
            for candidate in candidates
        ]
        table.add_row(escape(line), *cells)
    return table


def _visible(text: str) -> str:
    """Return the text of a candidate; a candidate of white space alone gets visible signs."""
    return text.replace("\n", "⏎").replace(" ", "␣") if text.isspace() else text


def blank_words(model: Model, texts: Sequence[str], seed: int, count: int) -> list[Question]:
    """Return questions: paragraphs in which one word is blanked.

    Args:
        model: the model. Only words that are one entry of its vocabulary are blanked, and only paragraphs that it can
            read whole.
        texts: the texts with the paragraphs.
        seed: the seed for paragraphs and words.
        count: the maximum number of questions.
    """
    source = random.Random(seed)
    paragraphs = [paragraph.strip("\n") for text in texts for paragraph in re.split(r"\n\s*\n", text)]
    fit = [paragraph for paragraph in paragraphs if SHORTEST <= len(paragraph) <= LONGEST and BLANK not in paragraph]
    longest = model.task.max_length or LONGEST
    questions: list[Question] = []
    for text in source.sample(fit, len(fit)):
        entries = model.tokenizer.encode_with_spans(text)[1]
        words = [match for match in WORD.finditer(text) if match.span() in entries]
        # The start and the end need one position each, and a blank without its white space one more.
        if words and len(entries) + 3 <= longest and len(questions) < count:
            chosen = source.choice(words)
            questions.append(Question(text[: chosen.start()] + BLANK + text[chosen.end() :], chosen.group()))
    return questions


def places_of_the_right_word(model: Model, questions: Sequence[Question], batch_size: int | None) -> list[float]:
    """Return, for each rank, the share of questions whose right word is the model's candidate of this rank."""
    size = batch_size or max(1, len(questions))
    places: Counter[int] = Counter()
    for start in range(0, len(questions), size):
        batch = questions[start : start + size]
        filled = model.fill([question.text for question in batch], top_k=len(PLACES))
        for question, blanks in zip(batch, filled, strict=True):
            candidates = [candidate.text for candidate in blanks[0]]
            places.update([candidates.index(question.word)] if question.word in candidates else [])
    return [places[rank] / max(1, len(questions)) for rank in range(len(PLACES))]


def commonest_word(questions: Sequence[Question]) -> tuple[str, float]:
    """Return the most frequent word, and the share of questions for which it is right."""
    if not questions:
        return "", 0.0
    ((word, count),) = Counter(question.word for question in questions).most_common(1)
    return word, count / len(questions)
