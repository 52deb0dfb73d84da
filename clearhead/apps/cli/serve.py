"""`clearhead serve`: serve models over HTTP until a signal ends the command."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import shlex
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from clearhead.apps.cli.console import print_message, print_result
from clearhead.apps.cli.options import Device, Precision, Threads, locate_model, set_threads_and_seed
from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError, RunFailure

if TYPE_CHECKING:
    from clearhead.apps.serve.api.served import Models, ServedModel

Result = TypeVar("Result")
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_NAME: Final = re.compile(r"[._-]*[A-Za-z0-9][A-Za-z0-9._-]*")

Host = Annotated[str, typer.Option("--host", help="The address to listen on; by default this machine only.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 chooses a free one.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="F", help="File of keys, one per line; each request needs one.")
]
OpenAPI = Annotated[
    bool, typer.Option("--openapi", help="Serve /openapi.json also with --api-key-file; it then needs a key.")
]
SharePrefixes = Annotated[
    bool,
    typer.Option(
        "--share-prefixes/--no-share-prefixes",
        help="Share the KV cache of equal prompt prefixes: up to 1 GB, an eighth of the free memory.",
    ),
]

BeyondPositions = Annotated[
    bool,
    typer.Option(
        "--beyond-positions",
        help="Allow more than max_position_embeddings for checkpoints that compute positions.",
    ),
]


def serve(
    refs: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]REF ...", help="Run directories or checkpoints, with optional names."),
    ],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: KeyFile = None,
    openapi: OpenAPI = False,
    share_prefixes: SharePrefixes = True,
    beyond_positions: BeyondPositions = False,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
) -> None:
    """Serve models over HTTP: OpenAI's protocol and Hugging Face's task schema.

    \b
    Example:
      clearhead serve runs/de-en
      clearhead serve path/to/gpt2 vectors=path/to/minilm --port 8080
      clearhead serve runs/shakespeare --host 0.0.0.0 --api-key-file keys.txt

    OpenAI clients connect to http://127.0.0.1:8000/v1. NAME=REF names a model (letters, digits, ".", "_", "-"); without
    NAME, the last folder of REF is the name. A prompt and its answer must fit into the model's positions. Requests
    share a running batch. /v1/models lists the models, /health reports that all have generated a token, /metrics is for
    Prometheus. Texts are never logged. SIGTERM finishes running requests and refuses new ones; a second one ends them.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"serve needs {' and '.join(missing)}; install them: {make_install_command(extra='serve')}")
    keys = () if api_key_file is None else _keys(api_key_file)
    if host not in ("127.0.0.1", "localhost", "::1") and not keys:
        print_message(f"warning: {host} may be open to other machines without a key: give --api-key-file")
    set_threads_and_seed(threads, None)
    from clearhead.apps.serve.api.application import make_application
    from clearhead.apps.serve.api.server import Server, hosts_of
    from clearhead.apps.serve.explorer import listen
    from clearhead.apps.serve.gate import Access

    refs_by_name = _name_models(refs)
    listener = listen(port, host)
    port = listener.getsockname()[1]
    with listener:
        models = _run_in_thread(
            lambda: _load_models(
                refs_by_name, device, precision, shares_prefixes=share_prefixes, beyond_positions=beyond_positions
            )
        )
        try:
            _run_in_thread(lambda: _warm_up(models))
            for line in _lines(models, host, port, api_key_file):
                print_result(line)
            logging.getLogger("clearhead.apps.serve").setLevel(logging.INFO)  # the log of requests
            server = Server(make_application(models, Access(hosts_of(host, port), keys=keys), openapi=openapi))
            server.run(sockets=[listener])
        finally:
            models.join()
    if server.received == signal.SIGINT:
        raise KeyboardInterrupt


def _keys(path: Path) -> tuple[str, ...]:
    from clearhead.base.files import read_text_file

    keys = tuple(line.strip() for line in read_text_file(path, "file of keys").splitlines() if line.strip())
    if not keys:
        raise InputError(f"{path} has no key: write one key per line")
    return keys


def _run_in_thread(work: Callable[[], Result]) -> Result:
    """Run a function in a short-lived thread and return its result.

    OpenMP's threads live as long as the thread that started them. Together with those of the main thread, the threads
    of an engine would exceed the processors, and steps would take twice as long.
    """
    result, context = Future[Result](), contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again where the result is read
            result.set_exception(error)

    # A daemon thread, so that Ctrl-C ends the program while models load.
    thread = threading.Thread(target=run, name="loading", daemon=True)
    thread.start()
    value = result.result()
    thread.join()
    return value


def _name_models(refs: list[str]) -> dict[str, str]:
    """Return the model references by name; refuse an invalid or repeated name."""
    from clearhead.checkpoints.reference import ModelReference, repository_of

    refs_by_name: dict[str, str] = {}
    for ref in refs:
        name, equals, path = ref.partition("=")
        if not equals or ModelReference.parse(ref).folder.exists():
            folder, path = Path(ref.partition("@")[0]), ref
            name = (repository_of(folder) or folder.name).rpartition("/")[2] or ref
        elif not _NAME.fullmatch(name):
            raise InputError(
                f"'{name}' in {ref} cannot name a model: use letters, digits, '.', '_' and '-', as in small=runs/de-en"
            )
        if name in refs_by_name:
            raise InputError(f"two models have the name '{name}': name one of them, such as b={path}")
        refs_by_name[name] = path
    return refs_by_name


def _load_models(
    refs_by_name: dict[str, str], device: str, precision: str, *, shares_prefixes: bool, beyond_positions: bool
) -> Models:
    """Load the models; if one of several cannot be loaded, serve the others."""
    import clearhead
    from clearhead.apps.serve.api.served import Models, ServedModel

    served: list[ServedModel] = []
    failed: dict[str, str] = {}
    for name, ref in refs_by_name.items():
        try:
            model = clearhead.load(locate_model(ref), device=device, precision=precision)
            is_lifted = beyond_positions and model.spec.declared_length is not None
            served.append(ServedModel(name, model, shares_prefixes, is_lifted))
        except (InputError, RunFailure) as error:
            if len(refs_by_name) == 1:
                raise
            failed[name] = f"{error}"
            print_message(f"clearhead: {name} is not served: {error}")
    if not served:
        raise RunFailure("no model could be loaded: see the reasons above")
    if beyond_positions and not any(model.beyond_positions for model in served):
        raise InputError("--beyond-positions has no effect on models without max_position_embeddings: leave it out")
    return Models(served, failed)


def _warm_up(models: Models) -> None:
    """Compute one token or prediction with each model, so that the first request is not slow."""
    import torch

    for served in models:
        if served.writes and served.model.module.encoder is None:
            served.model.generate("a", max_new_tokens=1, temperature=0)
        elif served.writes:
            served.model.translate("a", max_length=2)
        else:
            with torch.inference_mode():
                served.model.tree(torch.zeros(1, 1, dtype=torch.int64))


def _lines(models: Models, host: str, port: int, key_file: Path | None) -> list[str]:
    """Return the start message of the server: a line for each model, and a curl command for a first request."""
    lines = []
    # Clients cannot connect to a wildcard address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    for served in models:
        dtype = str(next(served.model.module.parameters()).dtype).removeprefix("torch.")
        if served.model.runner.in_bf16:
            dtype += " with products in bf16"
        batches = "results do not depend on the batch"
        if not served.model.is_batch_invariant:
            batches = "results depend on the batch by rounding"
        about = f"{served.name}: {served.model.task.kind}, {dtype}, {_limit(served)}, {batches}"
        lines.append(f"{about}, at {address}/v1")
    path, body = _example(next(iter(models)))
    key = "" if key_file is None else f' -H "Authorization: Bearer $(grep -m 1 . {shlex.quote(str(key_file))})"'
    body_text = shlex.quote(json.dumps(body, ensure_ascii=False))
    lines.append(f"curl {address}{path} -H 'Content-Type: application/json'{key} -d {body_text}")
    return lines


def _limit(served: ServedModel) -> str:
    """Return the maximum text length of a model as text."""
    from clearhead.generate.decoder import longest_sentence
    from clearhead.tasks.outputs import max_input_length

    module, longest = served.model.module, served.model.task.max_length
    if served.translates:
        return f"texts of at most {longest_sentence(module, longest):,} tokens"
    if not served.writes:
        return f"texts of at most {max_input_length(module, longest):,} tokens"
    limit = module.max_positions if served.beyond_positions else module.spec.position_limit
    return "no limit of positions" if limit is None else f"at most {limit:,} tokens with the prompt"


def _example(served: ServedModel) -> tuple[str, dict[str, Any]]:
    """Return the path and body of an example request for the model."""
    from clearhead.spec.tasks.registry import find_task

    model, outputs = served.model, find_task(served.model.task.kind).outputs
    if served.writes and not served.translates:
        return "/v1/completions", {"model": served.name, "prompt": "Once upon a time"}
    inputs: Any = "a text"
    if outputs == "span":
        inputs = {"question": "What is this?", "context": "This is a text."}
    elif model.task.is_paired:
        inputs = {"text": "a text", "text_pair": "another text"}
    elif outputs == "vocabulary" and not served.writes and model.tokenizer.mask_id is not None:
        inputs = f"a {model.tokenizer.entries()[model.tokenizer.mask_id]}"
    codes = [] if model.hf_checkpoint is None else [*model.hf_checkpoint.tokenizers.languages]
    languages = {"parameters": {"src_lang": codes[0], "tgt_lang": codes[-1]}} if codes and served.translates else {}
    return f"/models/{served.name}", {"inputs": inputs, **languages}
