"""`clearhead generate`: continue a prompt, and print the text while it is generated."""

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

Prompt = Annotated[list[str] | None, typer.Option("--prompt", help="Text to continue; repeat it for several prompts.")]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompt-file", metavar="F|-", help="A file with the prompt; its last line end is left out."),
]
LineFile = Annotated[
    Path | None, typer.Option("--file", metavar="F|-", help="A file of prompts, one per line; one text for each.")
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the most probable token.")]
Chat = Annotated[bool, typer.Option("--chat", help="Format the prompt as a message by the chat template.")]
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
    """Continue a prompt, or start a text without one; print it while it is generated.

    \b
    Example:
      clearhead generate runs/stories --prompt "Once upon a time"
      clearhead generate runs/stories --prompt "Once" --temperature 0.7 --seed 7
      clearhead generate runs/code --prompt-file begin.py --beam-size 4 --json
      clearhead generate runs/stories --file in.txt -o out.jsonl --json --seed 7

    Text is sampled with the settings of the checkpoint. Without settings, the temperature is 0.8, and top-p is 0.95
    unless a filter is given. A line on stderr names the settings and the seed, which reproduces the text. Neither
    --greedy nor --beam-size samples.

    The output is the text after the prompt. Several sequences, and the best of --beam-size, are printed when they are
    finished, with a line --- between them. The score is the log-probability / length ** A, where A is the length
    penalty. --json writes {"index", "prompt", "text", "tokens", "score", "stop_reason", "seed"} for each sequence.

    A prompt and its --max-new-tokens must fit into the positions of the model. Checkpoints that compute positions are
    limited by max_position_embeddings; --beyond-positions lifts this limit. Without --max-new-tokens, a text ends at
    the last position at the latest.

    --task puts the prefix of a task before each prompt and uses the checkpoint's settings for this task, which
    `clearhead inspect` shows. With --schema, the text is JSON that follows the schema, without white space. If
    --max-new-tokens cuts the JSON off, a line on stderr reports it, and the exit code is 1.

    With --file, the text for each prompt is one line, with spaces for line ends; --json has the exact text. An empty
    line gives an empty line.
    """
    options: dict[str, Any] = {**decoding, **_temperature(greedy, decoding)}
    reading = {"chat": chat, **({} if schema is None else {"schema": schema})}
    if file is not None:
        resolve_options(GenerateOptions, options, {})
        if prompt or prompt_file is not None:
            raise InputError("--file already gives the prompts: leave out --prompt and --prompt-file")
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
    """Generate and print the texts, drawing a seed if none is given; report the sampling settings on stderr."""
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
    """Generate one continuation for each line of a file, and print it."""
    settled = model.generate_options(**options)
    if settled.num_return_sequences > 1:
        raise InputError("--file writes one text per prompt: leave out --num-return-sequences")
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
    """Raise `RunFailure` if the length limit cut off texts under a schema before their JSON was complete."""
    num_cut = sum(reason != "end" for reason in reasons)
    if num_cut and "schema" in reading:
        raise RunFailure(
            f"{num_cut} of {len(reasons)} texts reached the length limit before the JSON was complete: raise "
            "--max-new-tokens"
        )


def _temperature(greedy: bool, options: GenerateKwargs) -> dict[str, float]:
    if greedy and "temperature" in options:
        raise InputError("--greedy and --temperature exclude each other: give one of them")
    return {"temperature": 0.0} if greedy else {}


def _prompts(texts: Sequence[str], file: Path | None) -> list[str]:
    if texts and file is not None:
        raise InputError("--prompt and --prompt-file both give the prompt: use one of them")
    return ["\n".join(read_lines(file))] if file is not None else list(texts) or [""]


def _check(options: dict[str, Any], prompts: Sequence[str]) -> bool:
    """Refuse conflicting options before a model is loaded; return whether the output is streamed."""
    checked = resolve_options(GenerateOptions, options, {})
    if "batch_size" in options and len(prompts) == 1:
        raise InputError("--batch-size has no effect on a single prompt; leave it out")
    return checked.method != "beam" and checked.num_return_sequences == 1 and len(prompts) == 1


def _for_task(model: Model, task: str | None) -> tuple[Model, str]:
    return (model, "") if task is None else model.for_task(task)


def _print_sampling_settings(options: GenerateOptions) -> None:
    """Print the sampling settings and the seed to stderr, if text is sampled."""
    if options.method == "sample":
        filters = {"top-k": options.top_k or None, "top-p": options.top_p, "min-p": options.min_p or None}
        shown = [f"{name} {value:g}" for name, value in filters.items() if value not in (None, 1.0)]
        settings = ", ".join([f"temperature {options.divisor:g}", *shown, f"seed {options.seed}"])
        print_message(f"sampled with {settings}; --greedy takes the most probable token each time")


def _show_stream(pieces: Iterator[str]) -> Generation:
    """Print a streamed text and end its last line, even after Ctrl-C or a failure; return the generation."""
    last = ""
    try:
        while True:
            piece = next(pieces)
            # Remember the piece before printing: Ctrl-C may come in between.
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
