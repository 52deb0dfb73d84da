"""`clearhead view --serve`: the explorer as a page of this machine, computed on demand."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from clearhead.cli.console import print_either, print_message
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead import Model
    from clearhead.maps.reading import ReadKwargs


def refuse_without_serve(options: Mapping[str, bool]) -> None:
    """Refuse what a live page cannot do, before a model is loaded.

    Args:
        options: whether each option was given that is for a file.

    Raises:
        InputError: packages are missing, or an option has no effect.
    """
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InputError(f"--serve needs {' and '.join(missing)}: install them with pip install 'clearhead[serve]'")
    without_effect = [name for name, is_given in options.items() if is_given]
    if without_effect:
        raise InputError(
            f"{', '.join(without_effect)} has no effect on a live page, which shows and measures on demand"
        )


def serve_explorer(
    model: Model, title: str, text: str, target: str | None, generate: int, port: int, reading: ReadKwargs,
    *, as_json: bool,
) -> None:  # fmt: skip
    """Serve the explorer of a model until a signal ends it.

    Args:
        model: the model.
        title: the heading of the page.
        text, target, generate: what it reads at first.
        port: of this machine; 0: one that is free.
        reading: how texts are read, as for `Model.attention`.
        as_json: whether the address is written as JSON.

    Raises:
        InputError: the port is in use.
    """
    from clearhead.serve.app import Access, listen, make_app, run
    from clearhead.serve.explorer import explorer_router
    from clearhead.serve.runs import Asked, Runs
    from clearhead.serve.work import Workers

    listener = listen(port)
    access, workers = Access(listener.getsockname()[1]), Workers()
    first = Asked(text=text, target=target, generate=generate)
    app = make_app(access, workers, [explorer_router(Runs(model, title, reading), workers, first)])
    print_either(as_json, {"url": access.address, "port": access.port}, access.address)
    print_message("open this address in a browser of this machine; Ctrl-C ends the program")
    run(app, listener, workers)
