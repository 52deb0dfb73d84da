"""HTTP routes that generate no text: embeddings, tokenization, the list of models, and health checks."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from clearhead.apps.serve.api.bodies import BodyRoute, DetokenizeRequest, EmbeddingRequest, TokenizeRequest, in_thread
from clearhead.apps.serve.api.served import Models, ServedModel, check_ids
from clearhead.base.errors import ContextTooLong, InputError, nth_text
from clearhead.model.facade import Model
from clearhead.spec.tasks.registry import find_task
from clearhead.tasks.outputs import max_input_length
from clearhead.text.long_texts import encode_start, refuse_enormous
from clearhead.text.tokenizer import Tokenizer


def reading_router(models: Models) -> APIRouter:
    """Return the routes of embeddings, tokenization, the list of models, and health."""
    router = APIRouter(route_class=BodyRoute)

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(served_model) for served_model in models]}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return _card(models.get(name))

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        return Response(status_code=200)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        served = models.get(body.model)
        texts, tokens = await in_thread(_texts, served, body)
        future = served.engine.call("embed", lambda some: list(served.model.embed(some)), texts)
        return await in_thread(_embeddings, served, body, await asyncio.wrap_future(future), tokens)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        return await in_thread(_tokenize, models.get(body.model), body)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        return await in_thread(_detokenize, models.get(body.model).tokenizer, body.tokens)

    return router


def _embeddings(served: ServedModel, body: EmbeddingRequest, outputs: list[Any], tokens: int) -> Response:
    """Return the answer with one vector for each text, shortened to the dimensions that the client requests."""
    vectors = np.stack(outputs)
    width = vectors.shape[1]
    if body.dimensions is not None:
        if body.dimensions > width:
            raise InputError(f"dimensions is {body.dimensions}, but vectors have {width} numbers: request no more")
        vectors = vectors[:, : body.dimensions]
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
    data = [
        {"object": "embedding", "index": index, "embedding": _encode_vector(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "data": data, "model": served.name, "usage": usage})


def _tokenize(served: ServedModel, body: TokenizeRequest) -> Response:
    refuse_enormous([body.text], None)
    tokenizer = served.model.tokenizers.source
    if not body.add_special_tokens:
        ids = tokenizer.encode(body.text)
    elif served.writes:
        ids = list(served.prompt_ids(served.request(body.text, served.model.generate_options())))
    else:
        ids = tokenizer.special_tokens.for_text(tokenizer.encode(body.text))
    return JSONResponse({"tokens": ids, "pieces": tokenizer.tokens(ids), "count": len(ids)})


def _detokenize(tokenizer: Tokenizer, ids: list[int]) -> Response:
    check_ids(ids, tokenizer.vocab_size)
    return JSONResponse({"text": tokenizer.decode(ids), "pieces": tokenizer.tokens(ids)})


def _num_tokens(model: Model, texts: list[str]) -> int:
    """Return the number of tokens of all texts, special tokens included.

    Raises:
        ContextTooLong: a text has more tokens than the model can read.
    """
    tokenizer, most = model.tokenizers.source, max_input_length(model.tree, model.task.max_length)
    extra = tokenizer.special_tokens.num_added(paired=False)
    ids, is_cut = encode_start(tokenizer, texts, most - extra)
    if any(is_cut):
        name = "input" if len(texts) == 1 else nth_text(is_cut.index(True) + 1)
        raise ContextTooLong(f"{name} has more than the {most:,} tokens that the model reads: split or shorten it")
    return sum(len(text_ids) + extra for text_ids in ids)


def _texts(served: ServedModel, body: EmbeddingRequest) -> tuple[list[str], int]:
    """Return the texts of a request, and their number of tokens, special tokens included.

    Raises:
        InputError: the model gives no vectors, or a text has more tokens than the model reads.
    """
    if find_task(served.model.task.kind).outputs != "vector":
        raise InputError(
            f"the model '{served.name}' was trained to '{served.model.task.kind}' and gives no vectors: "
            "choose another model"
        )
    tokenizer = served.model.tokenizers.source

    def decode(ids: list[int]) -> str:
        check_ids(ids, tokenizer.vocab_size)
        return tokenizer.decode(ids)

    if isinstance(body.input, str):
        texts = [body.input]
    elif ids := [token for token in body.input if isinstance(token, int)]:
        texts = [decode(ids)]
    else:
        texts = [text if isinstance(text, str) else decode(text) for text in body.input if not isinstance(text, int)]
    return texts, _num_tokens(served.model, texts)


def _encode_vector(vector: Any, encoding: str) -> list[float] | str:
    if encoding == "float":
        return [float(number) for number in vector]
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")


def _card(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "clearhead",
        "task": served.model.task.kind,
    }
