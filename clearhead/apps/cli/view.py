"""`clearhead view`: show the attention of a model as a page, as a picture, or live in a browser."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from clearhead.apps.cli.console import print_either, print_message
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
    decoding_option,
    locate_model,
    set_threads_and_seed,
)
from clearhead.apps.cli.progress import show_counts
from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError
from clearhead.generate.options import GenerateOptions

if TYPE_CHECKING:
    from clearhead import AttentionMaps, Model
    from clearhead.interpret.maps.outcome import OutcomeChoice


Serve = Annotated[bool, typer.Option("--serve", help="Serve a live page to change text and model, until Ctrl-C.")]
Port = Annotated[
    int | None, typer.Option("--port", min=1, max=65535, help="The port of the live page; by default a free one.")
]
# The parameters of `view` that have an effect on a live page.
_SHARED = {
    "ref", "text", "target", "generate", "beam_size", "from_language", "to_language", "device", "precision", "threads",
    "as_json",
}  # fmt: skip


def takes_serve(view: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a live page to the command `view`."""
    signature = inspect.signature(view, eval_str=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    serve_parameters = [
        inspect.Parameter("serve", kind, default=False, annotation=Serve),
        inspect.Parameter("port", kind, default=None, annotation=Port),
    ]

    @wraps(view)
    def run(serve: bool, port: int | None, **values: Any) -> None:
        if not serve and port is None:
            view(**values)
            return
        # typer stores the first name of an option as its default.
        options = {name: get_args(parameter.annotation)[-1].default for name, parameter in signature.parameters.items()}
        without_effect = [options[name] for name, value in values.items() if name not in _SHARED and value]
        _check_serve_options(serve, without_effect)
        model = ComputeOptions(values["device"], values["precision"], values["threads"]).load_exact(values["ref"])
        _serve(model, port or 0, values)

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *serve_parameters]
    )
    return run


def _check_serve_options(is_live: bool, without_effect: Sequence[str]) -> None:
    """Refuse options that a live page does not support, before a model is loaded.

    Args:
        is_live: True if --serve was given, False if only --port was.
        without_effect: names of the given options that need an output file.
    """
    if not is_live:
        raise InputError("--port has no effect without --serve: add --serve")
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InputError(f"--serve needs {' and '.join(missing)}; install them: {make_install_command(extra='serve')}")
    if without_effect:
        raise InputError(f"{', '.join(without_effect)} has no effect on a live page: leave it out")


def _serve(model: Model, port: int, values: Mapping[str, Any]) -> None:
    """Serve the explorer of a model until a signal ends it.

    Args:
        model: the model.
        port: the port on this machine. 0 means a free one.
        values: the arguments of the command `view` by parameter name.

    Raises:
        InputError: the port is in use.
    """
    from clearhead.apps.serve.explorer import explorer_router, listen, make_app, run
    from clearhead.apps.serve.gate import Access
    from clearhead.apps.serve.page_computations import PageRequest, Runs
    from clearhead.apps.serve.work import Workers
    from clearhead.fast.native.load import library
    from clearhead.interpret.maps.map_inputs import ReadKwargs

    listener = listen(port)
    library()  # compile the kernels before the first request
    port = listener.getsockname()[1]
    access, workers = Access.of_page(port), Workers()
    first = PageRequest(text=values["text"], target=values["target"], generate=values["generate"])
    reading = ReadKwargs(
        beam_size=values["beam_size"], from_language=values["from_language"], to_language=values["to_language"]
    )
    runs = Runs(model, Path(values["ref"]).name or values["ref"], reading)
    app = make_app(access, workers, [explorer_router(runs, workers, first)])
    print_either(values["as_json"], {"url": access.address, "port": port}, access.address)
    print_message("open this address in a browser on this machine; Ctrl-C ends the program")
    run(app, listener, workers)


# Endings of output files, and the name of the default picture.
PAGE, PICTURES, ARRAYS, MATRIX = ".html", (".svg", ".png"), ".npz", "matrix"

Text = Annotated[str, typer.Argument(metavar="TEXT", help="The input text; ___ or the mask token is a blank.")]
Target = Annotated[
    str | None, typer.Option("--target", metavar="TEXT", help="The decoder's text; by default its own output.")
]
Generate = Annotated[int, typer.Option("--generate", metavar="N", min=0, help="Continue the text by at most N tokens.")]
Beams = Annotated[int, decoding_option(GenerateOptions, "beam_size", ranged=True)]
Layers = Annotated[str | None, typer.Option("--layers", metavar="L", help="The layers shown, such as 0,3-5.")]
Heads = Annotated[str | None, typer.Option("--heads", metavar="H", help="The heads shown, such as 0,3-5.")]
Effects = Annotated[bool, typer.Option("--effects", help="Measure the effect of every head on the output.")]
Of = Annotated[
    list[str] | None,
    typer.Option("--of", metavar="P", help="Explain this output (position, token, label); with two, why the first."),
]
Checkpoints = Annotated[
    bool, typer.Option("--checkpoints", help="Show all checkpoints of a run, to see how heads formed.")
]
Compare = Annotated[
    str | None, typer.Option("--compare", metavar="TEXT", help="A second text, side by side with the first.")
]
CompareWith = Annotated[
    str | None, typer.Option("--compare-with", metavar="REF", help="A second model, side by side with the first.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="A page .html, a picture .svg or .png, or .npz.")
]
View = Annotated[
    str | None, typer.Option("--view", help="For a picture: overview, or matrix with --layers L and --heads H.")
]
StackOption = Annotated[
    str | None, typer.Option("--stack", help="For a picture: encoder.self, decoder.self or decoder.memory.")
]


@takes_serve
def view(
    ref: Ref,
    text: Text,
    target: Target = None,
    generate: Generate = 0,
    beam_size: Beams = 1,
    layers: Layers = None,
    heads: Heads = None,
    effects: Effects = False,
    of: Of = None,
    checkpoints: Checkpoints = False,
    compare: Compare = None,
    compare_with: CompareWith = None,
    output: Output = None,
    picture: View = None,
    stack: StackOption = None,
    from_language: FromLanguage = None,
    to_language: ToLanguage = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show the attention of every head on a text, as one page that needs no network.

    \b
    Example:
      clearhead view runs/de-en "Zwei Hunde spielen im Schnee." -o heads.html
      clearhead view runs/shakespeare "My lord," --generate 30 --effects
      clearhead view runs/de-en "Zwei Hunde." --serve
      clearhead view runs/de-en "Zwei Hunde." --view matrix \\
        --stack decoder.memory --layers 2 --heads 1 -o head.svg

    The page shows all heads, a head as a matrix, a token through all layers, the logit lens and the beam search. Heads
    chosen by --layers and --heads are stored in full precision; --effects also measures each of their attended tokens.
    Option --checkpoints shows all weights that a run kept. The page explains the last token, the first blank or the
    predicted label; --of names another output. With --of Mary --of John it explains why the model prefers Mary.
    """
    path = output or Path(re.sub(r"[^\w.-]+", "-", Path(ref).name or "attention") + PAGE)
    together = {"--checkpoints": checkpoints, "--compare": compare, "--compare-with": compare_with}
    _check_options(path, force, [name for name, value in together.items() if value], effects or bool(of))
    chosen = _parse_numbers(layers, "--layers"), _parse_numbers(heads, "--heads")
    _check_picture(path, picture, stack, *chosen)
    resolved_ref = locate_model(ref)
    set_threads_and_seed(threads, None)
    reading = {"from_language": from_language, "to_language": to_language, "beam_size": beam_size}
    attend = _AttentionReader(device, precision, generate, reading, chosen, path.suffix == PAGE)
    maps = attend(resolved_ref, text, target)
    if path.suffix == PAGE:
        runs = _page_runs(attend, maps, (ref, text, target), checkpoints, compare, compare_with)
        _write_page(
            path, Path(ref).name or ref, runs, (*chosen, effects, _parse_outcome(of or [])), is_timeline=checkpoints
        )
    elif path.suffix == ARRAYS:
        maps.save(path, layers=chosen[0], heads=chosen[1], force=force)
    else:
        layer, head = (None if numbers is None else numbers[0] for numbers in chosen)
        maps.save_picture(path, view=picture or MATRIX, stack=stack, layer=layer, head=head, force=force)
    print_either(as_json, {"path": str(path), **maps.token_lists()}, str(path))


@dataclass(frozen=True)
class _AttentionReader:
    """Loads models and computes their attention on a text, for the layers and heads shown."""

    device: str
    precision: str
    generate: int
    reading: dict[str, Any]
    shown: tuple[list[int] | None, list[int] | None]
    is_page: bool

    def load(self, ref: str) -> Model:
        return ComputeOptions(self.device, self.precision).load_exact(ref)

    def __call__(self, ref: str, text: str, target: str | None) -> AttentionMaps:
        return self._read(self.load(ref), text, target)

    def read_with_other(self, ref: str, maps: AttentionMaps, text: str, target: str | None) -> AttentionMaps:
        """Return another model's attention on the same tokens, or on the same text if vocabulary or stacks differ."""
        model = self.load(ref)
        has_same_tokens = model.tokenizers.fingerprint == maps.tokenizers.fingerprint
        is_same = has_same_tokens and model.spec.family == maps.module.spec.family
        return maps.with_module(model.module) if is_same else self._read(model, text, target)

    def _read(self, model: Model, text: str, target: str | None) -> AttentionMaps:
        if self.is_page:
            _refuse_long(model, text, self.generate, *self.shown)
        with show_counts("tokens", counts="tokens"):
            return model.attention(text, target, self.generate, precision="auto", **self.reading)


def _refuse_long(model: Model, text: str, generate: int, layers: list[int] | None, heads: list[int] | None) -> None:
    """Refuse a text that is too long for a page before the model reads it: attention is quadratic in its length."""
    from clearhead import spec
    from clearhead.interpret.view.explorer.encode import refuse_too_many

    stack = model.spec.encoder or model.spec.decoder
    assert stack is not None, "a validated model has a stack"
    most_heads = max((node.num_heads for _, node in spec.walk(stack) if isinstance(node, spec.Attention)), default=0)
    num_layers = len(stack.layers) if layers is None else len(layers)
    num_heads = most_heads if heads is None else len(heads)
    tokens = len(model.tokenizers.source.encode(text)) + generate
    # A causal mask hides half of the weights.
    refuse_too_many(num_layers * num_heads * min(tokens, model.module.max_positions or tokens) ** 2 // 2)


def _page_runs(
    attend: _AttentionReader,
    maps: AttentionMaps,
    reading: tuple[str, str, str | None],
    checkpoints: bool,
    compare: str | None,
    compare_with: str | None,
) -> list[tuple[str, AttentionMaps]]:
    """Return the attention maps shown on a page, each with its label."""
    from clearhead.checkpoints.weights.files import with_weights

    ref, text, target = reading
    if compare is not None:
        return [(text, maps), (compare, attend(ref, compare, None))]
    if compare_with is not None:
        return [(ref, maps), (compare_with, attend.read_with_other(compare_with, maps, text, target))]
    if not checkpoints:
        return [("", maps)]
    return [
        (label, maps.with_module(with_weights(maps.module, file))) for label, file in _checkpoint_files(ref).items()
    ]


def _write_page(
    path: Path,
    title: str,
    runs: list[tuple[str, AttentionMaps]],
    options: tuple[list[int] | None, list[int] | None, bool, OutcomeChoice],
    *,
    is_timeline: bool,
) -> None:
    from clearhead.interpret.maps.page import SampleOptions, explorer_page
    from clearhead.interpret.view.explorer.write import write_page

    page = explorer_page(title, runs, SampleOptions(*options), is_timeline=is_timeline, notify=_notify)
    write_page(page, path)


def _check_options(path: Path, force: bool, together: list[str], has_outcome: bool) -> None:
    """Refuse options without effect and an output file that cannot be written, before a model is loaded."""
    from clearhead.base.files import refuse_unwritable

    if path.suffix not in (PAGE, *PICTURES, ARRAYS):
        raise InputError(f"-o {path} has an unknown ending: expected .html, .svg, .png or .npz")
    if len(together) > 1:
        raise InputError(f"{' and '.join(together)} exclude each other: give one of them")
    if path.suffix != PAGE and (together or has_outcome):
        named = ", ".join([*together, *(["--effects or --of"] if has_outcome else [])])
        raise InputError(f"{named} has no effect on {path}: give -o a name that ends in .html")
    refuse_unwritable(path, force=force)


def _check_picture(
    path: Path, picture: str | None, stack: str | None, layers: list[int] | None, heads: list[int] | None
) -> None:
    """Refuse picture options if the output is no picture file, and several heads for one picture."""
    if path.suffix not in PICTURES:
        if picture is not None or stack is not None:
            raise InputError(f"--view and --stack have no effect on {path}: give -o a name that ends in .svg")
    elif any(numbers is not None and len(numbers) > 1 for numbers in (layers, heads)):
        raise InputError("a picture shows one head: give one number to --layers and one to --heads")


def _parse_numbers(text: str | None, option: str) -> list[int] | None:
    """Parse a list of numbers and ranges, such as 0,3-5."""
    if text is None:
        return None
    numbers: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", item)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise InputError(f"{option} {text} is not a list of numbers; expected numbers and ranges, such as 0,3-5")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(numbers)


def _parse_outcome(of: Sequence[str]) -> OutcomeChoice:
    """Parse --of: a position, one or two tokens or labels, or a position followed by these."""
    position = [int(of[0])] if of and of[0].isdecimal() else []
    tokens = of[len(position) :]
    if len(tokens) > 2:
        raise InputError(f"--of got {len(tokens)} outputs: give one, or two to compare the first with the second")
    parts: Any = (*position, *tokens)
    return parts if len(parts) > 1 else next(iter(parts), None)


def _checkpoint_files(ref: str) -> dict[str, Path]:
    """Return the weight files of all training steps that a run has kept, in order, by label."""
    from clearhead.checkpoints.reference import ModelReference
    from clearhead.checkpoints.runs.checkpoint import find_undamaged_weights, read_best, snapshots_folder
    from clearhead.checkpoints.runs.directory import is_run_directory

    run = ModelReference.parse(ref).folder
    steps = find_undamaged_weights(snapshots_folder(run), run / "checkpoints")
    if not is_run_directory(run):
        raise InputError(f"--checkpoints needs a run, but {run} is not a run directory: name one")
    if len(steps) < 2:
        raise InputError(
            f"--checkpoints plays the checkpoints of a run, but {run} kept {len(steps)}: train it with snapshots = 10 "
            "under [train] of its run file"
        )
    best = read_best(run)
    return {f"step {step:,}" + (" (best)" if step == best else ""): file for step, file in steps.items()}


def _notify(done: int, total: int) -> None:
    print_message(f"effects: {done} of {total}")
