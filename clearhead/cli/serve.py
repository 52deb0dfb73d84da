"""`clearhead serve`: models behind one address, until a signal ends it."""

from __future__ import annotations

import contextvars
import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from clearhead.cli.console import print_message, print_result
from clearhead.cli.options import Device, Precision, Threads, located, set_threads_and_seed
from clearhead.commands import make_install_command
from clearhead.errors import InputError, RunFailure

if TYPE_CHECKING:
    from clearhead.serve.api.served import Models, Served

Result = TypeVar("Result")
NEEDED = ("fastapi", "uvicorn", "prometheus_client")

Host = Annotated[str, typer.Option("--host", help="The address it listens on; by default this machine alone.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0: one that is free.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="F", help="Keys, one in a line, of which requests carry one.")
]
SharePrefixes = Annotated[
    bool,
    typer.Option(
        "--share-prefixes/--no-share-prefixes",
        help="Prompts with an equal prefix share its keys and values: up to 1 GB, an eighth of the free memory.",
    ),
]


def serve(
    refs: Annotated[list[str], typer.Argument(metavar="REF [REF ...]", help="Run directories or checkpoints.")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: KeyFile = None,
    share_prefixes: SharePrefixes = True,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
) -> None:
    """Serve models in OpenAI's protocol and Hugging Face's task schema.

    \b
    Example:
      clearhead serve runs/de-en
      clearhead serve path/to/gpt2 path/to/minilm --port 8080
      clearhead serve runs/shakespeare --host 0.0.0.0 --api-key-file keys.txt

    Clients of OpenAI's API use http://127.0.0.1:8000/v1; a model is named by the last part of its reference. Requests
    share a running batch, which they join and leave at every token. GET /v1/models lists the models, /health is ready
    once each has given a first token, /metrics is for Prometheus. Texts are never logged. SIGTERM finishes what runs
    and refuses what comes; a second one ends at once.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"serve needs {' and '.join(missing)}; install them: {make_install_command(extra='serve')}")
    keys = () if api_key_file is None else _keys(api_key_file)
    if host not in ("127.0.0.1", "localhost", "::1") and not keys:
        print_message(f"clearhead: {host} may be reached by other machines, and no key is needed: give --api-key-file")
    set_threads_and_seed(threads, None)
    from clearhead.serve.api.application import Server, hosts_of, make_application
    from clearhead.serve.app import listen
    from clearhead.serve.gate import Access

    listener = listen(port, host)
    port = listener.getsockname()[1]
    models = _in_own_thread(lambda: _loaded(refs, device, precision, shares_prefixes=share_prefixes))
    try:
        _in_own_thread(lambda: _warm(models))
        for line in _lines(models, host, port):
            print_result(line)
        logging.getLogger("clearhead.serve").setLevel(logging.INFO)  # the log of requests
        server = Server(make_application(models, Access(hosts_of(host, port), keys=keys)))
        server.run(sockets=[listener])
    finally:
        models.join()
        listener.close()
    if server.received == signal.SIGINT:
        raise KeyboardInterrupt


def _keys(path: Path) -> tuple[str, ...]:
    from clearhead.files import read_text_file

    keys = tuple(line.strip() for line in read_text_file(path, "file of keys").splitlines() if line.strip())
    if not keys:
        raise InputError(f"{path} holds no key: write one in a line")
    return keys


def _in_own_thread(work: Callable[[], Result]) -> Result:
    """Return what a function returns in a thread that ends with it.

    The threads of OpenMP that a thread has called stay as long as it does. Beside those of the main thread, those of an
    engine would be more than there are processors, and sleep whenever they wait: steps would take twice as long.
    """
    result, context = Future[Result](), contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            result.set_exception(error)

    # Ctrl-C ends the program while it loads, without waiting for it.
    thread = threading.Thread(target=run, name="loading", daemon=True)
    thread.start()
    found = result.result()
    thread.join()
    return found


def _loaded(refs: list[str], device: str, precision: str, *, shares_prefixes: bool) -> Models:
    """Load the models; one that cannot be loaded does not take the others down."""
    import clearhead
    from clearhead.serve.api.served import Models, Served

    served: list[Served] = []
    failed: dict[str, str] = {}
    for ref in refs:
        name = Path(ref.partition("@")[0]).name or ref
        if name in failed or name in [one.name for one in served]:
            raise InputError(f"two models are named '{name}', by which clients ask for them: rename a folder")
        try:
            model = clearhead.load(located(ref), device=device, precision=precision)
            served.append(Served(name, model, shares_prefixes))
        except (InputError, RunFailure) as error:
            if len(refs) == 1:
                raise
            failed[name] = f"{error}"
            print_message(f"clearhead: {name} is not served: {error}")
    if not served:
        raise RunFailure("no model could be loaded")
    return Models(served, failed)


def _warm(models: Models) -> None:
    """Let each model give a first token, or a first prediction, so that the first client waits for nothing."""
    import torch

    for served in models:
        if served.writes and served.model.module.encoder is None:
            served.model.generate("a", max_new_tokens=1, temperature=0)
        elif served.writes:
            served.model.translate("a", max_length=2)
        else:
            with torch.inference_mode():
                served.model.tree(torch.zeros(1, 1, dtype=torch.int64))


def _lines(models: Models, host: str, port: int) -> list[str]:
    lines = []
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    for served in models:
        dtype = str(next(served.model.module.parameters()).dtype).removeprefix("torch.")
        if served.model.runner.in_bf16:
            dtype += " with products in bf16"
        batches = "no result depends on the others of its batch"
        if not served.model.is_batch_invariant:
            batches = "results depend on the others of their batch by rounding"
        lines.append(f"{served.name}: {served.model.task.kind}, {dtype}, {batches}, at {address}/v1")
    first = next(iter(models))
    body = f'{{"model": "{first.name}", "prompt": "Once upon a time"}}' if first.writes else '{"input": "a text"}'
    path = "completions" if first.writes else "embeddings"
    lines.append(f"curl {address}/v1/{path} -H 'Content-Type: application/json' -d '{body}'")
    return lines
