"""Slow schemas: other requests continue, a disconnect cancels the compilation, and refusals have a reason."""

from __future__ import annotations

import concurrent.futures
import gc
import time
from typing import Any

import httpx
import pytest

from clearhead.generate import json_schema

pytestmark = pytest.mark.slow
LONG = {"type": "integer", "multipleOf": 10_000_019}


def ask(address: str, schema: Any = None, timeout: float = 300) -> httpx.Response:
    formats = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    body = {"model": "lm", "messages": [{"role": "user", "content": "a m"}], "max_tokens": 16}
    body |= {} if schema is None else {"response_format": formats}
    return httpx.post(f"{address}/v1/chat/completions", json=body, timeout=timeout)


def test_chats_go_on_while_schemas_are_compiled(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(address).status_code == 200
    monkeypatch.setattr(json_schema, "SECONDS", 1.0)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        long = [pool.submit(ask, address, LONG) for _ in range(6)]
        time.sleep(0.5)
        assert all(ask(address).status_code == 200 for _ in range(3))
        assert not all(future.done() for future in long)
        answers = [future.result() for future in long]
    assert {answer.status_code for answer in answers} == {400}
    assert all("the JSON schema took more than 1 seconds" in answer.text for answer in answers)
    assert ask(address, {"enum": ["a", 1]}).status_code == 200


def test_a_client_that_leaves_ends_the_compilation(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ask(address, {"enum": ["a"]})
    monkeypatch.setattr(json_schema, "SECONDS", 10_000.0)
    children = json_schema._children()
    with pytest.raises(httpx.ReadTimeout):
        ask(address, LONG, timeout=0.5)
    for _ in range(600):
        if children.qsize() == json_schema.MOST_AT_ONCE:
            break
        time.sleep(0.05)
    assert any("was given up" in child._fault for child in children.queue)
    gc.collect()  # asyncio tells of failures that no one has seen when they are collected
    assert "never retrieved" not in caplog.text


def test_a_schema_of_megabytes_has_a_reason(address: str) -> None:
    answer = ask(address, {"enum": ["a" * 2_000_000]})
    assert answer.status_code == 400 and "the JSON schema" in answer.json()["error"]["message"]
