"""`clearhead view --serve`: the explorer as a page of this machine, computed on demand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from clearhead.apps.cli.console import print_either, print_message
from clearhead.apps.cli.options import ComputeOptions
from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from clearhead import Model

Serve = Annotated[bool, typer.Option("--serve", help="A live page: change text and model, and watch, until Ctrl-C.")]
Port = Annotated[
    int | None, typer.Option("--port", min=1, max=65535, help="Of the live page; by default one that is free.")
]
# The parameters of `view` that a live page has too.
_SHARED = {
    "ref", "text", "target", "generate", "beam_size", "from_language", "to_language", "device", "precision", "threads",
    "as_json",
}  # fmt: skip


def takes_serve(view: Callable[..., None]) -> Callable[..., None]:
    """Give the command `view` the options of a live page."""
    signature = inspect.signature(view, eval_str=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [
        inspect.Parameter("serve", kind, default=False, annotation=Serve),
        inspect.Parameter("port", kind, default=None, annotation=Port),
    ]

    @wraps(view)
    def run(serve: bool, port: int | None, **values: Any) -> None:
        if not serve and port is None:
            view(**values)
            return
        # In an annotation the first name of an option stands where its default would.
        options = {name: get_args(one.annotation)[-1].default for name, one in signature.parameters.items()}
        given = [options[name] for name, value in values.items() if name not in _SHARED and value]
        _refuse(serve, given)
        model = ComputeOptions(values["device"], values["precision"], values["threads"]).load_model(values["ref"])
        _serve(model, port or 0, values)

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *own]
    )
    return run


def _refuse(is_live: bool, without_effect: Sequence[str]) -> None:
    """Refuse what a live page cannot do, before a model is loaded.

    Args:
        is_live: whether --serve was given, and not a port alone.
        without_effect: options that were given for a file.
    """
    if not is_live:
        raise InputError("--port is that of a live page: give --serve as well")
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InputError(f"--serve needs {' and '.join(missing)}; install them: {make_install_command(extra='serve')}")
    if without_effect:
        raise InputError(f"{', '.join(without_effect)} has no effect on a live page: leave it out")


def _serve(model: Model, port: int, values: Mapping[str, Any]) -> None:
    """Serve the explorer of a model until a signal ends it.

    Args:
        model: the model.
        port: of this machine; 0: one that is free.
        values: of the parameters of `view`.

    Raises:
        InputError: the port is in use.
    """
    from clearhead.apps.serve.explorer import explorer_router, listen, make_app, run
    from clearhead.apps.serve.gate import Access
    from clearhead.apps.serve.runs import Asked, Runs
    from clearhead.apps.serve.work import Workers
    from clearhead.fast.native.load import library
    from clearhead.interpret.maps.reading import ReadKwargs

    listener = listen(port)
    library()  # compiled before somebody waits for it
    port = listener.getsockname()[1]
    access, workers = Access.of_page(port), Workers()
    first = Asked(text=values["text"], target=values["target"], generate=values["generate"])
    reading = ReadKwargs(
        beam_size=values["beam_size"], from_language=values["from_language"], to_language=values["to_language"]
    )
    runs = Runs(model, Path(values["ref"]).name or values["ref"], reading)
    app = make_app(access, workers, [explorer_router(runs, workers, first)])
    print_either(values["as_json"], {"url": access.address, "port": port}, access.address)
    print_message("open this address in a browser of this machine; Ctrl-C ends the program")
    run(app, listener, workers)
