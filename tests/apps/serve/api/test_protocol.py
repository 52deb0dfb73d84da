"""Invalid and endless requests over a raw connection get a status with the protocol's error object, and end."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from clearhead.apps.serve.api import server
from clearhead.apps.serve.api.served import Models
from tests.apps.serve.api.conftest import running


def connect(address: str, room: int | None = None) -> socket.socket:
    """Return a connection; `room` is the size of its receive buffer in bytes."""
    client = socket.socket()
    client.settimeout(30)
    if room is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    client.connect(("127.0.0.1", int(address.rpartition(":")[2])))
    return client


def read_answer(client: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    received = b""
    while piece := client.recv(2**16):
        received += piece
    return received


def refusal_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and b"application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split(b" ")[1]), error


@pytest.mark.parametrize(
    ("content", "status", "sentence"),
    [
        (b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 2**20 + b"\r\n\r\n", 431, "may have at most 65,536 bytes"),
        (b"GET /" + b"a" * 2**20, 431, "may have at most 65,536 bytes"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "not a request of HTTP/1.1"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, "not a request of HTTP/1.1"),
    ],
)
def test_what_is_no_request_is_refused(content: bytes, status: int, sentence: str, address: str) -> None:
    with connect(address) as client:
        client.sendall(content)
        answer_status, error = refusal_of(read_answer(client))
    assert answer_status == status and sentence in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nX-Slow: "])
def test_a_connection_without_a_request_ends(head: bytes, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECONDS_TO_ASK", 0.3)
    with connect(address) as client:
        for index in range(len(head)):
            client.sendall(head[index : index + 1])
            time.sleep(0.005)
        status, error = refusal_of(read_answer(client))
    assert status == 408 and "no request came within" in error["message"]


@pytest.fixture
def narrow(models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a server with at most 8 connections."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 8)
    yield from running(models, ())


def test_idle_connections_make_room_for_others(narrow: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connect(narrow)) for _ in range(30)]
        waiting[-1].sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(3):
            assert httpx.get(f"{narrow}/health").status_code == 200
        assert read_answer(waiting[0]) == b"", "the oldest was closed"
        host = narrow.removeprefix("http://").encode()
        waiting[-1].sendall(b"Host: %s\r\nConnection: close\r\n\r\n" % host)
        assert read_answer(waiting[-1]).startswith(b"HTTP/1.1 200")
    assert [record.getMessage()[:23] for record in caplog.records] == ["8 connections are open:"]


def test_a_server_lives_longer_than_its_limit_for_an_answer(
    models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(server, "SECONDS_TO_ANSWER", 0.2)
        servers = running(models, ())
        next(servers)
        time.sleep(0.5)
        assert next(servers, None) is None, "the server ended"
    assert not caplog.records


def test_while_all_connections_are_busy_others_wait(narrow: str) -> None:
    host = narrow.removeprefix("http://").encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n" % host
    body = b'{"model": "lm", "text": "a"}'
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connect(narrow)) for _ in range(8)]
        for client in busy:
            client.sendall(head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body))
        time.sleep(0.5)
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{narrow}/health", timeout=1)
        busy[0].sendall(body)
        assert read_answer(busy[0]).startswith(b"HTTP/1.1 200")
        assert httpx.get(f"{narrow}/health", timeout=30).status_code == 200
        for client in busy[1:]:
            client.sendall(body)
            assert read_answer(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("line", [b"OPTIONS *", b"GET foo", b"GET http:", b"CONNECT a:80"])
def test_a_target_that_is_no_path_is_refused(line: bytes, address: str) -> None:
    with connect(address) as client:
        client.sendall(line + b" HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % address[7:].encode())
        answer = read_answer(client)
    assert answer.startswith(b"HTTP/1.1 400") and b"must be a path" in answer


def test_a_long_method_is_cut_in_the_log(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "clearhead.apps.serve"):
        assert httpx.request("A" * 60_000, f"{address}/health").status_code == 405
    (line,) = [record.getMessage() for record in caplog.records if "AAA" in record.getMessage()]
    assert len(line) < 100


def test_a_client_that_never_reads_is_hung_up_on(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer larger than the buffers of a connection waits for the client, but not for ever."""
    monkeypatch.setattr(server, "SECONDS_TO_READ", 0.3)
    body = json.dumps({"model": "lm", "text": "a m u e " * 80_000, "add_special_tokens": False}).encode()
    host = address.removeprefix("http://").encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n" % host
    aborted = []
    monkeypatch.setattr(server.Protocol, "pause_writing", _counting(server.Protocol.pause_writing, aborted))
    with connect(address, 4096) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        for _ in range(400):
            if aborted and aborted[0].is_closing():
                break
            time.sleep(0.05)
        assert aborted and aborted[0].is_closing()
        head, _, received = read_answer(client).partition(b"\r\n\r\n")
        assert len(received) < int(head.lower().partition(b"content-length: ")[2].split()[0])
    assert httpx.get(f"{address}/health").status_code == 200


def _counting(pause: Any, seen: list[Any]) -> Any:
    def count_closed(self: server.Protocol) -> None:
        seen.append(self.transport)
        pause(self)

    return count_closed


def test_garbage_behind_a_refused_head_is_no_failure(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), connect(address) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: evil.example\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 400")
        client.sendall(b"no chunk\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            read_answer(client)
    assert not caplog.records


def test_a_client_that_hangs_up_within_its_body_leaves_no_traceback(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with caplog.at_level(logging.ERROR, "uvicorn.error"):
        for _ in range(3):
            with connect(address) as client:
                client.sendall(head % address.partition("//")[2].encode() + b'{"model":')
                time.sleep(0.1)
        for _ in range(3):  # the server has seen the end of the connections before it
            assert httpx.get(f"{address}/health", timeout=30).status_code == 200
            time.sleep(0.1)
    assert not [record for record in caplog.records if record.exc_info]
