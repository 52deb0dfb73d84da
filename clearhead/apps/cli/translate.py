"""`clearhead translate`: one line in, one line out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import print_json, print_message, print_result
from clearhead.apps.cli.lines import InputLine, TextInput, answer_lines
from clearhead.apps.cli.options import (
    ComputeOptions,
    FromLanguage,
    JsonLines,
    LineFile,
    Ref,
    ToLanguage,
    decoding_option,
    takes_compute_options,
)
from clearhead.apps.cli.outputs import STANDARD_INPUT, AnswerFile, OutputOptions, RankedLines, explain_rounding
from clearhead.base.errors import InputError
from clearhead.generate.options import SearchKwargs, SearchOptions

if TYPE_CHECKING:
    from clearhead import Hypothesis
    from clearhead.interpret.maps.word_links import WordAligner

Alignments = Annotated[bool, typer.Option("--alignments", help="Write which words belong together, as 0-0 1-2.")]
AlignmentHeads = Annotated[
    str | None, typer.Option("--alignment-heads", metavar="L.H,...", help="By these heads, such as 2.0,3.1.")
]


@takes_compute_options
def translate(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
    n_best: Annotated[int, decoding_option(SearchOptions, "n_best")] = 1,
    from_language: FromLanguage = None,
    to_language: ToLanguage = None,
    alignments: Alignments = False,
    alignment_heads: AlignmentHeads = None,
    as_json: JsonLines = False,
    *,
    decoding: SearchKwargs,
    answers: OutputOptions,
    compute: ComputeOptions,
) -> None:
    """Translate text, one line in, one line out.

    \b
    Example:
      clearhead translate runs/de-en input.de > output.en
      echo "Zwei Hunde spielen im Schnee." | clearhead translate runs/de-en
      clearhead translate runs/de-en@averaged input.de --beam-size 8 --n-best 3
      clearhead translate checkpoints/m2m input.de --from de --to en
      clearhead translate runs/de-en large.de -o large.en --share 2/8 --resume

    An empty line is answered by an empty line. The score of a hypothesis is the sum of its log-probabilities divided by
    length ** A, where the length counts the end token and A is the length penalty, by default 1.0. The search for a
    sentence stops early once no unfinished hypothesis can still reach a better score than the worst of the best N
    finished ones. A checkpoint's own settings replace these defaults. With --n-best above 1 a line
    of output is "index ||| text ||| score", and the first index is 0.
    --alignments ends a line with " ||| 0-0 1-2": word 0 of the input and word 0 of the output, word 1 and word 2. The
    heads that align best in the first lines decide, and are named on stderr.
    Search is deterministic: --seed changes nothing unless the computation itself is random.
    """
    _check_options(decoding, n_best, as_json)
    heads = _parse_heads(alignment_heads) or alignments
    ranked = n_best > 1 and not as_json
    lines = TextInput.of(file, answers, RankedLines if ranked else AnswerFile)
    if heads is True:
        answers.refuse_unstable_choice(
            lines.output, "--alignments chooses heads by the first lines", "--alignment-heads"
        )
    model = compute.load_model(ref)
    explain_rounding(model, lines.output)
    aligner = model.word_aligner(heads, from_language, to_language) if heads else None

    def search(texts: list[str]) -> list[list[Hypothesis]]:
        translations = model.translate_n_best(
            texts, n=n_best, from_language=from_language, to_language=to_language, **decoding
        )
        return translations if aligner is None else _add_alignments(aligner, texts, translations)

    def show(line: InputLine, hypotheses: list[Hypothesis] | None) -> None:
        _show(line, hypotheses or [], n_best, as_json)

    answer_lines(lines, search, show, batch_size=compute.batch_size)


def _parse_heads(named: str | None) -> list[tuple[int, int]]:
    """Return the heads of --alignment-heads, such as 2.0,3.1."""
    parts = [] if named is None else named.split(",")
    matches = [re.fullmatch(r"\s*(\d{1,4})\.(\d{1,4})\s*", word) for word in parts]
    if not all(matches):
        raise InputError(f"--alignment-heads {named} names no heads; expected LAYER.HEAD, such as 2.0,3.1")
    return [(int(match[1]), int(match[2])) for match in matches if match]


def _add_alignments(
    aligner: WordAligner, texts: list[str], translations: list[list[Hypothesis]]
) -> list[list[Hypothesis]]:
    """Return translations with their alignments; the first time, say by which heads."""
    is_measured = aligner.heads is None
    aligned = aligner.add_to(texts, translations)
    if is_measured and aligner.heads is not None:
        heads = ",".join(f"{layer}.{head}" for layer, head in aligner.heads)
        print_message(f"alignments by the heads that align best in the first lines: --alignment-heads {heads}")
    return aligned


def _check_options(options: SearchKwargs, n_best: int, as_json: bool) -> None:
    """Refuse what cannot be done before a model is loaded."""
    search_values: dict[str, Any] = {**SearchOptions.usual, **options, "n_best": n_best}
    search = SearchOptions(**search_values)
    if "length_penalty" in options and search.beam_size == 1 and not as_json:
        raise InputError(
            "--length-penalty has no effect with --beam-size 1, which keeps a single hypothesis; remove one of the two"
        )


def _show(line: InputLine, hypotheses: Sequence[Hypothesis], n_best: int, as_json: bool) -> None:
    index = line.number - 1
    if as_json:
        records = [
            {
                "text": hypothesis.text,
                "score": hypothesis.score,
                "log_probability": hypothesis.log_probability,
                **({} if hypothesis.alignment is None else {"alignment": hypothesis.alignment}),
            }
            for hypothesis in hypotheses
        ]
        best = records[0] if records else {"text": "", "score": None, "log_probability": None}
        extra = {"hypotheses": records} if n_best > 1 else {}
        print_json({"index": index, "source": line.text, **best, **extra})
    elif n_best == 1:
        print_result(hypotheses[0].text + _alignment(hypotheses[0]) if hypotheses else "")
    else:
        for hypothesis in hypotheses:
            print_result(f"{index} ||| {hypothesis.text} ||| {hypothesis.score:.6f}{_alignment(hypothesis)}")
        if not hypotheses:
            print_result(f"{index} |||  ||| ")


def _alignment(hypothesis: Hypothesis) -> str:
    return "" if hypothesis.alignment is None else f" ||| {hypothesis.alignment}"
