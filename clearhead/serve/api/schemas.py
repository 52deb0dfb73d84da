"""JSON schemas of requests: they are compiled in threads of their own, and no longer than a client waits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Event
from typing import Any

from clearhead.generate.continuation import GenerateRequest
from clearhead.generate.json_schema import MOST_AT_ONCE, with_schema
from clearhead.serve.api.served import Served


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads of all models: a schema that takes long must not keep those of chat templates."""
    return ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="schemas")


async def request_under_schema(
    served: Served, generate_request: GenerateRequest, schema: Mapping[str, Any]
) -> GenerateRequest:
    """Return a request for text that follows a schema; the compilation ends when the client disconnects.

    Args:
        served: the model.
        generate_request: the request without the schema.
        schema: a JSON schema.

    Raises:
        InputError: the schema is refused, or exceeds its bounds.
    """
    abandoned, outputs = Event(), served.model.module.spec.num_outputs
    future = asyncio.get_running_loop().run_in_executor(
        _threads(), with_schema, generate_request, schema, served.tokenizer, outputs, abandoned
    )
    try:
        return await future
    finally:
        # Also where the server ends: its threads are waited for.
        abandoned.set()
