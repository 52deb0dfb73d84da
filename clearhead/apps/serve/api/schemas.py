"""Compilation of the JSON schemas of requests in separate threads, until it ends or the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Event
from typing import Any

from clearhead.apps.serve.api.failures import Closing
from clearhead.apps.serve.api.served import Served
from clearhead.apps.serve.gate import Traffic
from clearhead.apps.serve.work import POLLED, ignore_failure
from clearhead.generate.continuation import GenerateRequest
from clearhead.generate.json_schema import MOST_AT_ONCE, with_schema


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that compile schemas for all models; slow schemas must not delay chat templates."""
    return ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="schemas")


async def request_under_schema(
    traffic: Traffic, served: Served, generate_request: GenerateRequest, schema: Mapping[str, Any]
) -> GenerateRequest:
    """Return a request for text that follows a schema; the compilation ends when the client disconnects.

    Args:
        traffic: the requests of the server, which end after a signal.
        served: the model.
        generate_request: the request without the schema.
        schema: a JSON schema.

    Raises:
        InputError: the schema is refused, or exceeds its bounds.
        Closing: the server received a signal to end.
    """
    abandoned, outputs = Event(), served.model.module.spec.num_outputs
    future = asyncio.get_running_loop().run_in_executor(
        _threads(), with_schema, generate_request, schema, served.tokenizer, outputs, abandoned
    )
    try:
        while not (await asyncio.wait([future], timeout=POLLED))[0]:
            if traffic.is_closing:
                raise Closing("the server ends: try again later")
        return future.result()
    finally:
        abandoned.set()
        ignore_failure(future)
