"""A tiny model of each architecture, and requests to the application without a socket."""

from __future__ import annotations

import base64
import zlib
from functools import cache
from typing import Any

import numpy as np
import pytest

from clearhead.model.facade import Model
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.interpret.view.explorer.test_architectures import BLANK, TEXT, build_peaked, first_cases

pytest.importorskip("fastapi", reason="needs the extra serve")

from fastapi.testclient import TestClient

from clearhead.apps.serve.explorer import explorer_router, make_app
from clearhead.apps.serve.gate import Access
from clearhead.apps.serve.page_computations import PageRequest, Runs
from clearhead.apps.serve.work import Workers


@cache
def letters() -> Tokenizer:
    return train_tokenizer("character", ["abcdefghijklmnopqrstuvwxyz .,_'-"], vocab_size=37, mask=True)


@cache
def model_of(name: str) -> Model:
    case = first_cases()[name]
    return Model(build_peaked(case), TokenizerPair(letters(), letters(), True), TaskRecord(kind=case.variant.task))


def text_of(model: Model) -> str:
    return BLANK if model.task.kind == "fill" else TEXT


class Browser:
    """Client of the application of one model."""

    def __init__(self, model: Model, first: str | None = None) -> None:
        self.access, self.workers = Access.of_page(8765), Workers()
        self.runs = Runs(model, "tiny", {})
        router = explorer_router(self.runs, self.workers, PageRequest(text=first or text_of(model)))
        self.app = make_app(self.access, self.workers, [router])
        self.client = TestClient(self.app, base_url=f"http://{self.access.hosts[0]}")

    def post(self, path: str, **body: object) -> Any:
        return self.client.post(f"/{self.access.token}/{path}", json=body)

    def read(self, **body: object) -> Any:
        answer = self.post("read", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str, **query: object) -> Any:
        return self.client.get(f"/{self.access.token}/{path}", params=query)

    def blob(self, name: str, number: int, dtype: str) -> np.ndarray:
        packed = base64.b64decode(self.get(f"blob/{name}/{number}").text)
        planes = np.frombuffer(zlib.decompress(packed), np.uint8)
        return np.ascontiguousarray(planes.reshape(np.dtype(dtype).itemsize, -1).T).view(dtype).ravel()
