"""`clearhead generate`: text that goes on from a prompt, shown as it comes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.console import print_json, print_result, print_text, read_lines
from clearhead.cli.options import BatchSize, Device, LengthPenalty, Precision, Ref, Threads, set_threads_and_seed
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead import Model
    from clearhead.generate.options import GenerateOptions
    from clearhead.generate.results import Generation

SEPARATOR = "---"
# The parameters of the command that are options of the same name.
CHOSEN = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "beam_size", "length_penalty",
    "penalty_alpha", "stop", "seed", "batch_size",
)  # fmt: skip
# What a single growing text has no use for; the check before it lets only values without effect through.
NOT_STREAMED = ("num_return_sequences", "beam_size", "length_penalty")

Prompt = Annotated[
    list[str] | None, typer.Option("--prompt", help="What the text begins with; several times: several prompts.")
]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompt-file", metavar="F|-", help="A file that is the prompt, its last line end left out."),
]
MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", help="Most tokens generated; by default 100.")]
MinNewTokens = Annotated[int | None, typer.Option("--min-new-tokens", help="Fewest tokens before an end.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="Draw from logits divided by this; 0: the most probable token.")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Draw from the K most probable tokens.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Draw from the fewest tokens with probability P in all.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Draw from tokens with at least P times the largest probability.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Above 1: tokens that have occurred become less likely.")
]
NoRepeat = Annotated[int | None, typer.Option("--no-repeat-ngram-size", help="No N tokens in a row occur twice.")]
NoSourceNGrams = Annotated[
    int | None, typer.Option("--encoder-no-repeat-ngram-size", help="No N tokens in a row are also in what was read.")
]
NumSequences = Annotated[int | None, typer.Option("--num-return-sequences", help="Sequences for each prompt.")]
Beams = Annotated[int | None, typer.Option("--beam-size", help="Above 1: beam search with this many hypotheses.")]
PenaltyAlpha = Annotated[
    float | None, typer.Option("--penalty-alpha", help="Above 0: contrastive search among the --top-k tokens.")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Stop before this text; several times: before the first of them.")
]
GenerateSeed = Annotated[int | None, typer.Option("--seed", help="Draw, and draw the same whenever it is the same.")]
Chat = Annotated[bool, typer.Option("--chat", help="The prompt is a message, written out by the chat template.")]
Task = Annotated[
    str | None, typer.Option("--task", metavar="PREFIX", help="A task that the checkpoint lists, or its prefix.")
]
JsonSequences = Annotated[bool, typer.Option("--json", help="Write one JSON object for each sequence.")]


def generate(
    ref: Ref,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    max_new_tokens: MaxNewTokens = None,
    min_new_tokens: MinNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    no_repeat_ngram_size: NoRepeat = None,
    encoder_no_repeat_ngram_size: NoSourceNGrams = None,
    num_return_sequences: NumSequences = None,
    beam_size: Beams = None,
    length_penalty: LengthPenalty = None,
    penalty_alpha: PenaltyAlpha = None,
    stop: Stop = None,
    chat: Chat = False,
    task: Task = None,
    as_json: JsonSequences = False,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
    seed: GenerateSeed = None,
) -> None:
    """Continue a prompt, shown as it comes; without a prompt, begin a text.

    \b
    Example:
      clearhead generate runs/stories --prompt "Once upon a time" --max-new-tokens 200
      clearhead generate runs/stories --prompt "Once" --temperature 0.8 --top-p 0.95 --seed 7
      clearhead generate runs/code --prompt-file begin.py --beam-size 4 --json

    The most probable token is taken each time, unless --temperature, --top-k, --top-p, --min-p, --seed or several
    sequences ask for chance. Options that conflict are all named. The output is what follows the prompt. Several
    sequences, and the best of --beam-size, are shown once they are finished, with a line --- between them; the score is
    the sum of log-probabilities / length ** A. --json writes {"index", "prompt", "text", "tokens", "score",
    "stop_reason"} for each. Ctrl-C keeps what was shown. A model with a table of positions refuses a prompt that is
    longer than the table and stops where it ends; one whose positions are computed goes on beyond the length that it
    was trained on, and may write worse there. --task puts the prefix of a task in front of each prompt and
    takes the settings that the checkpoint lists for it; `clearhead inspect` shows them.
    """
    # Taken before anything else has a name here: the parameters alone.
    given = dict(locals())
    prompts = _prompts(prompt or [], prompt_file)
    options = {name: given[name] for name in CHOSEN if given[name] not in (None, [])}
    streams = _check(options, prompts) and not as_json
    import clearhead

    set_threads_and_seed(threads, seed)
    model = clearhead.load(ref, device=device, precision=precision)
    model, prompts = _for_task(model, task, prompts)
    if streams and _is_one_growing_text(model, options):
        streamed = {name: value for name, value in options.items() if name not in NOT_STREAMED}
        _show_stream(model.stream(prompts[0], chat=chat, **streamed))
    else:
        _show_all(prompts, model.generate(prompts, chat=chat, **options), as_json)


def _prompts(texts: Sequence[str], file: Path | None) -> list[str]:
    if texts and file is not None:
        raise InputError("--prompt and --prompt-file are two ways to give the prompt: give one of them")
    return ["\n".join(read_lines(file))] if file is not None else list(texts) or [""]


def _check(options: dict[str, Any], prompts: Sequence[str]) -> bool:
    """Refuse options that conflict before a model is loaded; return whether there is one sequence, piece by piece."""
    from clearhead.generate.options import GenerateOptions

    try:
        checked = GenerateOptions(**options)
    except InputError as error:
        raise InputError(_as_flags(str(error), GenerateOptions)) from None
    if "batch_size" in options and len(prompts) == 1:
        raise InputError("--batch-size has no effect with one prompt, which is a batch by itself; remove it")
    return checked.method != "beam" and checked.num_return_sequences == 1 and len(prompts) == 1


def _for_task(model: Model, task: str | None, prompts: list[str]) -> tuple[Model, list[str]]:
    if task is None:
        return model, prompts
    chosen, prefix = model.for_task(task)
    return chosen, [prefix + prompt for prompt in prompts]


def _is_one_growing_text(model: Model, options: dict[str, Any]) -> bool:
    """Whether a checkpoint's own settings leave it at one sequence whose text is certain as it comes."""
    if model.hf_checkpoint is None:
        return True
    merged = model.hf_checkpoint.options(options, model.module)
    return all(merged.get(name, 1) == 1 for name in ("beam_size", "num_return_sequences"))


def _as_flags(message: str, options: type[GenerateOptions]) -> str:
    """Name options as they are written on a command line."""
    names = "|".join(sorted(options.__dataclass_fields__, key=len, reverse=True))
    return re.sub(rf"\b({names})\b(?! search)", lambda match: "--" + match[0].replace("_", "-"), message)


def _show_stream(pieces: Iterable[str]) -> None:
    """Show a text piece by piece and end its last line, also where Ctrl-C or a failure cuts it off."""
    last = ""
    try:
        for piece in pieces:
            # Noted first: Ctrl-C can come as soon as the piece is on its way.
            last = piece or last
            print_text(piece)
    finally:
        if last and not last.endswith("\n"):
            print_result()


def _show_all(prompts: Sequence[str], found: Sequence[Sequence[Generation]], as_json: bool) -> None:
    sequences = [(index, one) for index, several in enumerate(found) for one in several]
    for number, (index, one) in enumerate(sequences):
        if as_json:
            print_json(
                {
                    "index": index,
                    "prompt": prompts[index],
                    "text": one.text,
                    "tokens": one.tokens,
                    "score": one.score,
                    "stop_reason": one.stop_reason,
                }
            )
            continue
        if number:
            print_result(SEPARATOR)
        print_result(one.text.removesuffix("\n"))
