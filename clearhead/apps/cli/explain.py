"""`clearhead explain`: show the forward pass of a model on a text in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import print_either, print_json, print_text
from clearhead.apps.cli.options import (
    ComputeOptions,
    Device,
    Force,
    FromLanguage,
    Json,
    Precision,
    Ref,
    Threads,
    ToLanguage,
    set_threads_and_seed,
)
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from clearhead.interpret.explain.explanation import Explanation
    from clearhead.interpret.explain.score import NonlinearNorm, ScoreTerms


def explain(
    ref: Ref,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text that the model reads.")],
    target: Annotated[
        str | None, typer.Option("--target", metavar="TEXT", help="The decoder's text; by default its own output.")
    ] = None,
    stack: Annotated[
        str | None, typer.Option("--stack", help="encoder or decoder, if the model has both; by default decoder.")
    ] = None,
    layer: Annotated[int, typer.Option("--layer", metavar="N", min=0, help="The layer shown.")] = 0,
    head: Annotated[int, typer.Option("--head", metavar="N", min=0, help="The head shown.")] = 0,
    token: Annotated[
        int | None, typer.Option("--token", metavar="N", min=0, help="The token shown; by default the last.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write an HTML page of all layers and heads.")
    ] = None,
    from_language: FromLanguage = None,
    to_language: ToLanguage = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show the forward pass of a model on a text in numbers.

    \b
    Example:
      clearhead explain runs/shakespeare "My lord," --layer 2 --head 1
      clearhead explain runs/de-en "Zwei Hunde." --stack encoder --token 1
      clearhead explain runs/de-en "Zwei Hunde." -o forward.html

    The output goes from the text to tokens, embedding, norms, queries, keys, values, scores, mask, weights and
    probabilities. Each step has its formula, shape and numbers, and the lines of the core that compute it. The terminal
    shows one layer, head and token; a page shows all of them. Below each attention, the largest score is split into a
    sum over the modules that wrote its query and key. Layers, heads and tokens count from 0. With
    --json, the last line has all numbers of the chosen layer, head and token.
    """
    if output is not None:
        _check_output(output, force)
    elif force:
        raise InputError("--force has no effect without -o: leave it out")
    set_threads_and_seed(threads, None)
    explained = _explain(
        (ref, device, precision),
        (text, target, {"from_language": from_language, "to_language": to_language}),
        {"stack": stack, "layer": layer, "head": head, "token": token},
    )
    if output is not None:
        from clearhead.interpret.explain.page import write_explanation

        write_explanation(explained, output)
        print_either(as_json, {"path": str(output)}, str(output))
    elif as_json:
        print_json(_as_json(explained))
    else:
        from clearhead.interpret.explain.text import text_lines

        print_text("\n".join(text_lines(explained)), end="\n")


def _check_output(path: Path, force: bool) -> None:
    from clearhead.base.files import refuse_unwritable

    if path.suffix != ".html":
        raise InputError(f"-o {path} is not an HTML page: give a name that ends in .html")
    refuse_unwritable(path, force=force)


def _explain(
    loading: tuple[str, str, str], reading: tuple[str, str | None, dict[str, Any]], choice: dict[str, Any]
) -> Explanation:
    from clearhead.interpret.explain.explanation import explain_text

    ref, device, precision = loading
    text, target, languages = reading
    model = ComputeOptions(device, precision).load_exact(ref)
    maps = model.attention(text, target, precision="auto", **languages)
    return explain_text(maps, f"{Path(ref).name or ref} ({model.task.kind}) reads: {text}", **choice)


def _as_json(explained: Explanation) -> dict[str, Any]:
    choice = explained.selection
    values = []
    for section in explained.sections:
        if section.layer in (None, choice.layer) and section.stack in (choice.stack, "head"):
            for value in section.values:
                _, row = explained.rows(section, value)
                values.append(
                    {
                        "section": section.title,
                        "name": value.name,
                        "formula": value.formula,
                        "address": value.address,
                        "shape": list(value.numbers.shape),
                        "numbers": _finite(value.of_head(choice.head)[row].tolist()),
                        "code": value.code.location if value.code else None,
                    }
                )
    scores: list[dict[str, Any]] = [
        {
            "address": address,
            "key": key,
            **_terms(terms),
        }
        for address, (key, terms) in explained.scores.items()
    ]
    selection = {"stack": choice.stack, "layer": choice.layer, "head": choice.head, "token": choice.token}
    return {**selection, "tokens": explained.forward.tokens, "values": values, "scores": scores}


def _terms(terms: ScoreTerms | NonlinearNorm) -> dict[str, Any]:
    if isinstance(terms, Exception):
        return {"reason": terms.sentence}
    pairs = [[str(query_source), str(other), value] for query_source, other, value in terms.pairs()]
    return {"score": terms.score, "bias": terms.position_bias, "pairs": pairs}


def _finite(numbers: list[float]) -> list[float | None]:
    """Return numbers for JSON, with None for infinite numbers, such as masked scores."""
    return [None if abs(number) == float("inf") else number for number in numbers]
