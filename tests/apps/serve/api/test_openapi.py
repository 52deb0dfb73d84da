"""/openapi.json describes all answers, and is served only to clients with access."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from clearhead.apps.serve.api.application import make_application
from clearhead.apps.serve.api.served import Models
from clearhead.apps.serve.gate import Access
from tests.fuzz.requests import fuzz_operations

KEY = {"authorization": "Bearer key"}


@pytest.mark.parametrize(
    ("keys", "openapi", "headers", "status"),
    [
        ((), False, {}, 200),
        ((), True, {}, 200),
        (("key",), False, {}, 401),
        (("key",), False, KEY, 404),
        (("key",), True, {}, 401),
        (("key",), True, KEY, 200),
    ],
)
def test_who_receives_it(
    models: Models, keys: tuple[str, ...], openapi: bool, headers: dict[str, str], status: int
) -> None:
    app = make_application(models, Access(None, keys=keys), openapi=openapi)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get("/openapi.json", headers=headers)

    answer = asyncio.run(ask())
    assert answer.status_code == status
    if status == 200:
        paths = set(answer.json()["paths"])
        assert {"/v1/chat/completions", "/models/{name}", "/edit", "/models/lm/v1/embeddings", "/metrics"} <= paths


def test_answers_fit_it(address: str) -> None:
    counts, faults = fuzz_operations(int(address.rpartition(":")[2]), seed=1, operations=12)
    assert not faults and {"status 200", "status 400"} <= set(counts)
