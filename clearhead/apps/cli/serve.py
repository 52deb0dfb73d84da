"""`clearhead serve`: models at one address, until a signal ends it."""

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

Host = Annotated[str, typer.Option("--host", help="The address it listens on; by default this machine alone.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0: one that is free.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="F", help="Keys, one in a line, of which requests carry one.")
]
OpenAPI = Annotated[
    bool, typer.Option("--openapi", help="Serve /openapi.json with --api-key-file, too; it then needs a key.")
]
SharePrefixes = Annotated[
    bool,
    typer.Option(
        "--share-prefixes/--no-share-prefixes",
        help="Prompts with an equal prefix share its keys and values: up to 1 GB, an eighth of the free memory.",
    ),
]

BeyondPositions = Annotated[
    bool,
    typer.Option(
        "--beyond-positions",
        help="Go on beyond the max_position_embeddings of checkpoints that compute their positions.",
    ),
]


def serve(
    refs: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]REF ...", help="Run directories or checkpoints, with names if wanted."),
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
    """Serve models in OpenAI's protocol and Hugging Face's task schema.

    \b
    Example:
      clearhead serve runs/de-en
      clearhead serve path/to/gpt2 vectors=path/to/minilm --port 8080
      clearhead serve runs/shakespeare --host 0.0.0.0 --api-key-file keys.txt

    Clients of OpenAI's API use http://127.0.0.1:8000/v1. NAME=REF names a model with letters, digits, ".", "_" and "-";
    without a name it is the last folder of REF, or the repository's name. A prompt and its answer may have as many
    tokens as the model has positions. Requests
    share a running batch, which they join and leave at every token. GET /v1/models lists the models, /health is ready
    once each has given a first token, /metrics is for Prometheus. Texts are never logged. SIGTERM finishes what runs
    and refuses what comes; a second one ends at once.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"serve needs {' and '.join(missing)}; install them: {make_install_command(extra='serve')}")
    keys = () if api_key_file is None else _keys(api_key_file)
    if host not in ("127.0.0.1", "localhost", "::1") and not keys:
        print_message(f"warning: other machines may reach {host}, and no key protects it: give --api-key-file")
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
        raise InputError(f"{path} holds no key: write one in a line")
    return keys


def _run_in_thread(work: Callable[[], Result]) -> Result:
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
    value = result.result()
    thread.join()
    return value


def _name_models(refs: list[str]) -> dict[str, str]:
    """Return the references of the models by their names, or refuse a name that is invalid or taken."""
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
            raise InputError(f"two models are named '{name}', by which clients ask for them: name one, as b={path}")
        refs_by_name[name] = path
    return refs_by_name


def _load_models(
    refs_by_name: dict[str, str], device: str, precision: str, *, shares_prefixes: bool, beyond_positions: bool
) -> Models:
    """Load the models; one that cannot be loaded does not take the others down."""
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
        raise RunFailure("no model could be loaded")
    if beyond_positions and not any(model.beyond_positions for model in served):
        raise InputError(
            "--beyond-positions has no effect: no model computes its positions and has max_position_embeddings"
        )
    return Models(served, failed)


def _warm_up(models: Models) -> None:
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


def _lines(models: Models, host: str, port: int, key_file: Path | None) -> list[str]:
    """Return a line for each model, and a first request that can be copied."""
    lines = []
    # Clients cannot connect to a wildcard address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    for served in models:
        dtype = str(next(served.model.module.parameters()).dtype).removeprefix("torch.")
        if served.model.runner.in_bf16:
            dtype += " with products in bf16"
        batches = "no result depends on the others of its batch"
        if not served.model.is_batch_invariant:
            batches = "results depend on the others of their batch by rounding"
        about = f"{served.name}: {served.model.task.kind}, {dtype}, {_limit(served)}, {batches}"
        lines.append(f"{about}, at {address}/v1")
    path, body = _example(next(iter(models)))
    key = "" if key_file is None else f' -H "Authorization: Bearer $(grep -m 1 . {shlex.quote(str(key_file))})"'
    body_text = shlex.quote(json.dumps(body, ensure_ascii=False))
    lines.append(f"curl {address}{path} -H 'Content-Type: application/json'{key} -d {body_text}")
    return lines


def _limit(served: ServedModel) -> str:
    """Return the longest text of a model for its line."""
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
    """Return the path and the body of a request that the model answers."""
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
