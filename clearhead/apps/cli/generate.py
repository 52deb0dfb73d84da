"""`clearhead generate`: text that continues a prompt, printed as it is generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import print_either, print_json, print_message, print_result, print_text
from clearhead.apps.cli.lines import InputLine, TextInput, answer_lines, read_lines
from clearhead.apps.cli.options import ComputeOptions, Ref, takes_compute_options
from clearhead.apps.cli.outputs import OutputOptions, explain_rounding
from clearhead.base.errors import InputError, RunFailure
from clearhead.generate.options import GenerateKwargs, GenerateOptions, StreamKwargs, resolve_options

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
LineFile = Annotated[
    Path | None, typer.Option("--file", metavar="F|-", help="A file of prompts, one in a line, with one text for each.")
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
    file: LineFile = None,
    greedy: Greedy = False,
    chat: Chat = False,
    task: Task = None,
    schema: Schema = None,
    as_json: JsonSequences = False,
    *,
    decoding: GenerateKwargs,
    answers: OutputOptions,
    compute: ComputeOptions,
) -> None:
    """Continue a prompt, printed as it is generated; without a prompt, start a text.

    \b
    Example:
      clearhead generate runs/stories --prompt "Once upon a time"
      clearhead generate runs/stories --prompt "Once" --temperature 0.7 --seed 7
      clearhead generate runs/code --prompt-file begin.py --beam-size 4 --json
      clearhead generate runs/stories --file in.txt -o out.jsonl --json --seed 7

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
    the start of such a text: a line on stderr says so, and the command ends with 1. With --file the text for each
    prompt is one line, in which spaces replace line ends; --json has the exact text. An empty line is answered by an
    empty line.
    """
    options: dict[str, Any] = {**decoding, **_temperature(greedy, decoding)}
    reading = {"chat": chat, **({} if schema is None else {"schema": schema})}
    if file is not None:
        resolve_options(GenerateOptions, options, {})
        if prompt or prompt_file is not None:
            raise InputError("--file has the prompts: leave out --prompt and --prompt-file")
        lines = TextInput.of(file, answers)
        model, prefix = _for_task(compute.load_model(ref), task)
        _answer_file(model, lines, prefix, options, reading, answers)
        return
    answers.refuse_unused("without --file")
    prompts = _prompts(prompt or [], prompt_file)
    streams = _check(options, prompts) and not as_json
    model, prefix = _for_task(compute.load_model(ref), task)
    _run(model, [prefix + prompt for prompt in prompts], options, reading, streams=streams, as_json=as_json)


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
        _print_sampling_settings(settled)
        sequences = [_show_stream(pieces)]
    else:
        generations = model.generate(prompts, **reading, **options)
        _print_sampling_settings(settled)
        _show_all(prompts, generations, as_json)
        sequences = [sequence for of_prompt in generations for sequence in of_prompt]
    _refuse_incomplete_json([sequence.stop_reason for sequence in sequences], reading)


def _answer_file(
    model: Model,
    lines: TextInput,
    prefix: str,
    options: dict[str, Any],
    reading: dict[str, Any],
    answers: OutputOptions,
) -> None:
    """Continue each line of a file with one text."""
    settled = model.generate_options(**options)
    if settled.num_return_sequences > 1:
        raise InputError("--file has one text for each prompt: leave out --num-return-sequences")
    if settled.seed is not None and "seed" not in options:
        answers.refuse_unstable_choice(lines.output, "without --seed a seed is drawn", "--seed N")
        options["seed"] = settled.seed
    explain_rounding(model, lines.output)
    _print_sampling_settings(settled)
    reasons: list[str] = []

    def continue_each(prompts: list[str]) -> list[Generation]:
        results = model.generate([prefix + prompt for prompt in prompts], **reading, **options)
        reasons.extend(sequence.stop_reason for (sequence,) in results)
        return [sequence for (sequence,) in results]

    def show(line: InputLine, sequence: Generation | None) -> None:
        record = {"text": ""} if sequence is None else asdict(sequence)
        text = str(record["text"]).removesuffix("\n")
        print_either(lines.as_json, {"index": line.number - 1, "prompt": line.text, **record}, text)

    answer_lines(lines, continue_each, show, batch_size=settled.batch_size)
    _refuse_incomplete_json(reasons, reading)


def _refuse_incomplete_json(reasons: Sequence[str], reading: dict[str, Any]) -> None:
    """Report texts that were to follow a schema and have no end."""
    num_cut = sum(reason != "end" for reason in reasons)
    if num_cut and "schema" in reading:
        raise RunFailure(
            f"{num_cut} of {len(reasons)} texts reached the length limit before the JSON was complete: raise "
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
    checked = resolve_options(GenerateOptions, options, {})
    if "batch_size" in options and len(prompts) == 1:
        raise InputError("--batch-size has no effect with one prompt, which is a batch by itself; remove it")
    return checked.method != "beam" and checked.num_return_sequences == 1 and len(prompts) == 1


def _for_task(model: Model, task: str | None) -> tuple[Model, str]:
    return (model, "") if task is None else model.for_task(task)


def _print_sampling_settings(options: GenerateOptions) -> None:
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


def _show_all(prompts: Sequence[str], generations: Sequence[Sequence[Generation]], as_json: bool) -> None:
    sequences = [(index, sequence) for index, of_prompt in enumerate(generations) for sequence in of_prompt]
    for number, (index, sequence) in enumerate(sequences):
        if as_json:
            print_json({"index": index, "prompt": prompts[index], **asdict(sequence)})
            continue
        if number:
            print_result(SEPARATOR)
        print_text(sequence.text.removesuffix("\n"), end="\n")
