"""Fixtures: a server of tiny models on a port of this machine, with and without keys."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

import clearhead as ch
from clearhead.apps.serve.api.application import make_application
from clearhead.apps.serve.api.served import Models, ServedModel
from clearhead.apps.serve.api.server import Server, hosts_of
from clearhead.apps.serve.explorer import listen
from clearhead.apps.serve.gate import Access
from tests.fuzz.folders import encoder as sentence_encoder
from tests.hf_models import endless_model, language_model, translator
from tests.tasks.fine_tuning import encoder

MAKERS = {
    "lm": language_model,
    "rope": endless_model,
    "mt": translator,
    "sent": lambda folder: sentence_encoder(folder) or folder,
    "mlm": encoder,
    "labels": lambda folder: encoder(folder, "BertForSequenceClassification"),
    "tags": lambda folder: encoder(folder, "BertForTokenClassification"),
    "spans": lambda folder: encoder(folder, "BertForQuestionAnswering"),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("served")
    served = [ServedModel(name, ch.load(make(folder / name), precision="fp32")) for name, make in MAKERS.items()]
    return Models(served, {"broken": "its folder is empty"})


@pytest.fixture(scope="session")
def address(models: Models) -> Iterator[str]:
    """The address of a server that needs no key."""
    yield from running(models, ())


@pytest.fixture(scope="session")
def locked(models: Models) -> Iterator[str]:
    """The address of a server that needs a key."""
    yield from running(models, ("first-key", "second-key"))


def running(models: Models, keys: tuple[str, ...]) -> Iterator[str]:
    listener = listen(0)
    port = listener.getsockname()[1]
    app = make_application(models, Access(hosts_of("127.0.0.1", port), keys=keys))
    server = Server(app)
    logging.getLogger("uvicorn").propagate = True  # so that tests can read its records; uvicorn itself prevents it
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    for _ in range(600):
        if server.started:
            break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)
