"""`clearhead generate`: text that continues a prompt, printed as it is generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import print_json, print_message, print_result, print_text
from clearhead.apps.cli.lines import read_lines
from clearhead.apps.cli.options import ComputeOptions, Ref, takes_compute_options
from clearhead.base.errors import InputError, RunFailure
from clearhead.generate.options import GenerateKwargs, GenerateOptions, StreamKwargs, resolved

if TYPE_CHECKING:
    from clearhead import Model
    from clearhead.generate.results import Generation

SEPARATOR = "---"

Prompt = Annotated[
    list[str] | None, typer.Option("--prompt", help="Text to continue; given several times: several prompts.")
]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompt-file", metavar="F|-", help="A file with the prompt, without its last line end."),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Take the most probable token each time.")]
Chat = Annotated[bool, typer.Option("--chat", help="The prompt is a message, formatted by the chat template.")]
Task = Annotated[
    str | None, typer.Option("--task", metavar="PREFIX", help="A task that the checkpoint lists, or its prefix.")
]
Schema = Annotated[Path | None, typer.Option("--schema", metavar="F", help="A JSON schema that the text follows.")]
JsonSequences = Annotated[bool, typer.Option("--json", help="Write one JSON object for each sequence.")]


@takes_compute_options
def generate(
    ref: Ref,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    greedy: Greedy = False,
    chat: Chat = False,
    task: Task = None,
    schema: Schema = None,
    as_json: JsonSequences = False,
    *,
    decoding: GenerateKwargs,
    compute: ComputeOptions,
) -> None:
    """Continue a prompt, printed as it is generated; without a prompt, start a text.

    \b
    Example:
      clearhead generate runs/stories --prompt "Once upon a time"
      clearhead generate runs/stories --prompt "Once" --temperature 0.7 --seed 7
      clearhead generate runs/code --prompt-file begin.py --beam-size 4 --json

    Text is sampled as the settings of the checkpoint say; without any, with temperature 0.8 and, unless a filter is
    given, top-p 0.95. A line on stderr says so and names the seed, which gives the same text again. --greedy and
    --beam-size do not sample. The output is the text after the prompt. Several sequences, and the best of --beam-size,
    are printed once they are finished, with a line --- between them; the score is the sum of
    log-probabilities / length ** A. --json writes {"index", "prompt", "text", "tokens", "score", "stop_reason", "seed"}
    for each. A prompt and its --max-new-tokens must fit into the positions of the model: into its table, or into the
    max_position_embeddings of a checkpoint that computes them; --beyond-positions lifts the second limit. Without
    --max-new-tokens a text ends at the last position. --task puts the prefix of a task in front of
    each prompt and uses the settings that the checkpoint lists for it; `clearhead inspect` shows them. With --schema a
    text that ends is JSON under the schema, without white space between its parts. One that reaches --max-new-tokens is
    the start of such a text: a line on stderr says so, and the command ends with 1.
    """
    prompts = _prompts(prompt or [], prompt_file)
    options = {**decoding, **_temperature(greedy, decoding)}
    streams = _check(options, prompts) and not as_json
    model, prompts = _for_task(compute.load_model(ref), task, prompts)
    held = {} if schema is None else {"schema": schema}
    _run(model, prompts, options, {"chat": chat, **held}, streams=streams, as_json=as_json)


def _run(
    model: Model,
    prompts: list[str],
    options: dict[str, Any],
    reading: dict[str, Any],
    *,
    streams: bool,
    as_json: bool,
) -> None:
    """Generate, with a seed that is drawn here where none was given, and say how."""
    settled = model.generate_options(**options)
    options |= {} if settled.seed is None else {"seed": settled.seed}
    if streams and settled.beam_size == settled.num_return_sequences == 1:
        streamed = {name: value for name, value in options.items() if name in StreamKwargs.__annotations__}
        pieces = model.stream(prompts[0], **reading, **streamed)
        _say_how(settled)
        sequences = [_show_stream(pieces)]
    else:
        found = model.generate(prompts, **reading, **options)
        _say_how(settled)
        _show_all(prompts, found, as_json)
        sequences = [sequence for of_prompt in found for sequence in of_prompt]
    num_cut = sum(sequence.stop_reason != "end" for sequence in sequences)
    if num_cut and "schema" in reading:
        raise RunFailure(
            f"{num_cut} of {len(sequences)} texts reached the length limit before the JSON was complete: raise "
            "--max-new-tokens"
        )


def _temperature(greedy: bool, options: GenerateKwargs) -> dict[str, float]:
    if greedy and "temperature" in options:
        raise InputError("--greedy and --temperature are two ways to choose a token: give one of them")
    return {"temperature": 0.0} if greedy else {}


def _prompts(texts: Sequence[str], file: Path | None) -> list[str]:
    if texts and file is not None:
        raise InputError("--prompt and --prompt-file are two ways to give the prompt: give one of them")
    return ["\n".join(read_lines(file))] if file is not None else list(texts) or [""]


def _check(options: dict[str, Any], prompts: Sequence[str]) -> bool:
    """Refuse options in conflict before a model is loaded; return whether the output is streamed."""
    checked = resolved(GenerateOptions, options, {})
    if "batch_size" in options and len(prompts) == 1:
        raise InputError("--batch-size has no effect with one prompt, which is a batch by itself; remove it")
    return checked.method != "beam" and checked.num_return_sequences == 1 and len(prompts) == 1


def _for_task(model: Model, task: str | None, prompts: list[str]) -> tuple[Model, list[str]]:
    if task is None:
        return model, prompts
    chosen, prefix = model.for_task(task)
    return chosen, [prefix + prompt for prompt in prompts]


def _say_how(options: GenerateOptions) -> None:
    """Say on stderr that text is sampled, with what, and from which seed."""
    if options.method == "sample":
        filters = {"top-k": options.top_k or None, "top-p": options.top_p, "min-p": options.min_p or None}
        shown = [f"{name} {value:g}" for name, value in filters.items() if value not in (None, 1.0)]
        settings = ", ".join([f"temperature {options.divisor:g}", *shown, f"seed {options.seed}"])
        print_message(f"sampled with {settings}; --greedy takes the most probable token each time")


def _show_stream(pieces: Iterator[str]) -> Generation:
    """Print a text as it comes and end its last line, even after Ctrl-C or a failure; return the generation."""
    last = ""
    try:
        while True:
            piece = next(pieces)
            # Noted first: Ctrl-C can come while the piece is printed.
            last = piece or last
            print_text(piece)
    except StopIteration as end:
        sequence: Generation = end.value
        return sequence
    finally:
        if last and not last.endswith("\n"):
            print_result()


def _show_all(prompts: Sequence[str], found: Sequence[Sequence[Generation]], as_json: bool) -> None:
    sequences = [(index, sequence) for index, of_prompt in enumerate(found) for sequence in of_prompt]
    for number, (index, sequence) in enumerate(sequences):
        if as_json:
            print_json({"index": index, "prompt": prompts[index], **asdict(sequence)})
            continue
        if number:
            print_result(SEPARATOR)
        print_text(sequence.text.removesuffix("\n"), end="\n")
