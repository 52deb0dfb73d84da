"""Valid and changed requests to a server of tiny models, and the check of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase, settings, strategies
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.fuzz.folders import encoder as sentence_encoder
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.hf_models import language_model, translator
from tests.tasks.fine_tuning import encoder

MAKERS = {
    "lm": language_model,
    "mt": translator,
    "sent": sentence_encoder,
    "mlm": encoder,
    "labels": lambda folder: encoder(folder, "BertForSequenceClassification"),
    "tags": lambda folder: encoder(folder, "BertForTokenClassification"),
    "spans": lambda folder: encoder(folder, "BertForQuestionAnswering"),
}
WORDS = "the cat sat on mat and dog looked at it".split()
GET_PATHS = ("/health", "/metrics", "/v1/models", "/v1/models/lm", "/nowhere")
CHECKS = [not_a_server_error, response_schema_conformance, status_code_conformance]
SETTINGS = settings(
    max_examples=10, deadline=None, database=None, suppress_health_check=[*HealthCheck], phases=[Phase.generate]
)
SECONDS = 30
"""The most seconds until an answer."""
RAW_HEADERS = (
    b"X-Long: " + b"a" * 2**20, b"Content-Length: -1", b"Content-Length: 99999999999", b"Content-Length: 5",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Host: evil.example", b"Origin: http://evil.example",
    b"Content-Type: text/plain", b"Content-Type: multipart/form-data", b"Expect: 100-continue", b"Connection: close",
    b"Authorization: Bearer \xff\xfe", b"no colon", b": no name", b"X\x00: zero", b"Content-Encoding: gzip",
    b"Upgrade: websocket",
)  # fmt: skip
RAW_LINES = (
    b"", b"\x00" * 64, b"GET", b"GET /health", b"GET /health HTTP/9.9", b"POST /v1/completions HTTP/1.0",
    b"BREW /v1/completions HTTP/1.1", b"GET /" + b"a" * 2**17 + b" HTTP/1.1", b"GET /%ff%00/.. HTTP/1.1",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0", b"DELETE /v1/models HTTP/1.1",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A valid request.

    Args:
        path: the path of the request.
        body: the JSON body.
    """

    path: str
    body: dict[str, Any]

    def encode(self, head: bytes = b"", body: bytes | None = None, line: bytes | None = None) -> bytes:
        """Return the bytes of the request, optionally with another header line, body or first line."""
        content = json.dumps(self.body).encode() if body is None else body
        line = f"POST {self.path} HTTP/1.1".encode() if line is None else line
        lines = [line, b"Host: 127.0.0.1:PORT", b"Content-Type: application/json"]
        lines += [b"Content-Length: %d" % len(content), *([head] if head else [])]
        return b"\r\n".join(lines) + b"\r\n\r\n" + content


def draw_case(draw: random.Random) -> Case:
    """Return a random valid request."""
    text = " ".join(draw.choices(WORDS, k=draw.choice([1, 2, 5, 9])))
    letters = " ".join(draw.choices("a m u e".split(), k=draw.choice([1, 3, 8])))
    limit = draw.choice([1, 5, 20, 45])
    sampled = {"temperature": 0.9, "seed": draw.randrange(99), "n": draw.choice([1, 1, 3])}
    chosen = draw.choice([{"temperature": 0}, sampled])
    words = {"model": "lm", "prompt": letters[:15], "max_tokens": min(limit, 40), **chosen}
    mixed = {"address": "decoder.layers.0.steps.0.branches.0.function.mixed", "head": 1}
    message = [{"role": "user", "content": letters[:5]}]
    return draw.choice(
        [
            Case("/v1/completions", words),
            Case("/v1/completions", {**words, "logprobs": 2, "stop": ["u"]}),
            Case("/v1/completions", {**words, "prompt": [letters[:7], "a"], "echo": True, "logprobs": 1}),
            Case("/v1/chat/completions", {"model": "lm", "messages": message, "max_tokens": 7, **chosen}),
            Case("/v1/embeddings", {"model": "sent", "input": [text, "the cat"], "encoding_format": "base64"}),
            Case("/v1/embeddings", {"model": "sent", "input": text, "dimensions": 5}),
            Case("/tokenize", {"model": "lm", "text": letters}),
            Case("/detokenize", {"model": "lm", "tokens": [5, 6, 7]}),
            Case("/models/mt", {"inputs": letters}),
            Case("/models/mt", {"inputs": [letters, "a m"], "parameters": {"alignments": True}}),
            Case("/models/mt/pipeline/translation", {"inputs": [letters, letters[:3], "u"]}),
            Case("/models/labels", {"inputs": text}),
            Case("/models/tags/pipeline/token-classification", {"inputs": text}),
            Case("/models/spans", {"inputs": {"question": "the cat", "context": text}}),
            Case("/models/sent/pipeline/feature-extraction", {"inputs": text}),
            Case("/attention", {"model": draw.choice(["lm", "mlm"]), "text": "a", "layers": [0]}),
            Case("/capture", {"model": "lm", "text": "a m", "addresses": ["decoder.layers.*.after"]}),
            Case("/edit", {"model": "lm", "inputs": "a m", "parameters": {"max_new_tokens": 3}, "edits": [mixed]}),
        ]
    )


def draw_request(draw: random.Random) -> tuple[str, bytes]:
    """Return a description and the bytes of a request with a changed body, header or first line."""
    case = draw_case(draw)
    kind = draw.choice(["body", "body", "body", "bytes", "head", "line", "cut"])
    if kind == "body":
        body, what = mutate_json(json.dumps(case.body).encode(), draw)
        return f"{case.path}: {what}", case.encode(body=body)
    if kind == "bytes":
        body, what = mutate_bytes(json.dumps(case.body).encode(), draw)
        return f"{case.path}: {what}", case.encode(body=body)
    if kind == "head":
        head = draw.choice(RAW_HEADERS)
        return f"{case.path}: {head[:40]!r}", case.encode(head=head)
    if kind == "line":
        line = draw.choice(RAW_LINES)
        return f"{line[:40]!r}", case.encode(line=line)
    whole = case.encode()
    cut = draw.randrange(len(whole))
    return f"{case.path}: cut at {cut}", whole[:cut]


async def send(port: int, what: str, content: bytes) -> bytes:
    """Send bytes to a server, and return its answer until it closes the connection.

    Args:
        port: the port of the server on this machine.
        what: the description of the change.
        content: the bytes of the request, in which PORT stands for the port number.

    Raises:
        TimeoutError: the connection is still open after a while.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = content.replace(b":PORT", b":%d" % port).replace(b"\r\nHost", b"\r\nConnection: close\r\nHost", 1)
    try:
        writer.write(content)
        await writer.drain()
        if ": cut at" in what or "chunked" in what:
            # The server waits for the rest of the request, and closes the connection after an end of file.
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), SECONDS)
    except (ConnectionError, BrokenPipeError):
        # The server refused the request before all of it was sent.
        return b""
    finally:
        writer.close()


def fault_of(answer: bytes) -> str | None:
    """Return the fault in the answer to a changed request, or None.

    Args:
        answer: the bytes of the answer; empty if the server closed the connection without an answer.
    """
    if not answer:
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ")[1:2]
    if not status or not status[0].isdigit():
        return f"no status: {answer[:80]!r}"
    if b"Traceback" in answer:
        return f"a traceback: {body[:200]!r}"
    code = int(status[0])
    if code >= 500 and code != 503:
        return f"status {code}: {body[:200]!r}"
    if code >= 400 and b"application/json" in head:
        error = json.loads(body)["error"]
        if not error["message"] or len(error["message"]) > 2000:
            return f"status {code} without one clear sentence: {body[:200]!r}"
    return None


@dataclass
class Server:
    """A running server of the tiny models.

    Args:
        process: the process of the server.
        port: the port on this machine.
        faults: faults found when the server ended.
    """

    process: subprocess.Popen[str]
    port: int
    faults: list[str] = field(default_factory=list)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Return a context manager that serves every kind of model with `clearhead serve`, and ends it by a signal.

    Args:
        folder: an empty folder.
    """
    for name, make in MAKERS.items():
        make(folder / name)
    words = ["serve", *[str(folder / name) for name in MAKERS], "--port", "0", "--precision", "fp32", "--threads", "1"]
    with open(folder / "said", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "clearhead", *words], stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, (folder / "said").read_text("utf-8")
        server = Server(process, int(line.rpartition("http://127.0.0.1:")[2].partition("/")[0]))
        try:
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(90)
            process.kill()
            process.communicate()
        log.seek(0)
        text = log.read()
    if process.returncode != 128 + signal.SIGTERM or "Traceback" in text:
        server.faults.append(f"the server ended with {process.returncode} and said {text[-2000:]}")


def fuzz_operations(
    port: int, seed: int, *, seconds: float = math.inf, operations: float = math.inf
) -> tuple[dict[str, int], list[str]]:
    """Send requests that schemathesis derives from /openapi.json; return counts by status, and the faults.

    Half of the requests fit the schemas, the others do not. Each answer must fit the schema of its status.

    Args:
        port: the port of the server.
        seed: the seed of all requests.
        seconds, operations: the limits of time and of the number of operations, with 10 requests each.
    """
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
    known = [result.ok() for result in schema.get_all_operations()]
    draw, end, number = random.Random(f"{seed} operations"), time.monotonic() + seconds, 0
    counts: dict[str, int] = {}
    faults: list[str] = []

    def check(case: schemathesis.Case, name: str) -> None:
        # Replace the names that schemathesis invents by the name of a model.
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = name
        case.path_parameters = {key: name if key == "name" else value for key, value in case.path_parameters.items()}
        response = case.call(timeout=SECONDS)
        status = f"status {response.status_code}"
        counts[status] = counts.get(status, 0) + 1
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as error:
            faults.append(f"{case.operation.label}: {status}: {error.exceptions}: {case.as_curl_command()}"[:2000])

    while time.monotonic() < end and number < operations and len(faults) < 20:
        number += 1
        operation, names = draw.choice(known), strategies.sampled_from(sorted(MAKERS))
        test = hypothesis.given(case=operation.as_strategy(), name=names)(check)
        test = hypothesis.seed(draw.randrange(2**32))(test)
        SETTINGS(test)()
    return counts, faults


async def fuzz_requests(port: int, seed: int, seconds: float) -> tuple[dict[str, int], list[str]]:
    """Send one changed request after another; return counts by status, and the faults.

    Args:
        port: the port of the server.
        seed: the seed of all requests.
        seconds: the seconds until the last request.
    """
    end, number = time.monotonic() + seconds, 0
    counts: dict[str, int] = {}
    faults: list[str] = []
    while time.monotonic() < end and len(faults) < 20:
        what, content = draw_request(random.Random(f"{seed} request {number}"))
        try:
            answer = await send(port, what, content)
            fault = fault_of(answer)
        except (TimeoutError, ConnectionRefusedError, ValueError, KeyError) as error:
            answer, fault = b"", f"no answer: {error!r}"
        status = f"status {answer[9:12].decode('latin-1')}" if answer else "hung up"
        counts[status] = counts.get(status, 0) + 1
        if fault is not None:
            faults.append(f"request {number}: {what}: {fault}"[:900])
        number += 1
    return counts, faults
