"""Shutdown of a server process: running requests finish, and new ones get a status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.hf_models import language_model

pytestmark = pytest.mark.slow
BODY = json.dumps({"prompt": "a m", "max_tokens": 5, "temperature": 0}).encode()


@contextmanager
def process(folder: Path, files: int | None = None) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a server of one model and its port; `files` is the limit of open files."""
    shell = [] if files is None else ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"]
    command = [sys.executable, "-m", "clearhead", "serve", str(language_model(folder / "lm")), "--port", "0"]
    started = subprocess.Popen([*shell, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        assert "lm: generate, " in line and "results do not depend on the batch" in line
        yield started, int(line.rstrip().removesuffix("/v1").rpartition(":")[2])
    finally:
        started.kill()
        started.communicate()


def half_sent(port: int) -> socket.socket:
    """Send a request up to the middle of its body."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(BODY)}\r\nConnection: close\r\n\r\n".encode() + BODY[:10])
    return connection


def read_answer(connection: socket.socket) -> str:
    received = b""
    while piece := connection.recv(2**16):
        received += piece
    return received.decode()


def test_running_requests_end_and_new_ones_are_refused(tmp_path: Path) -> None:
    with process(tmp_path) as (server, port), half_sent(port) as connection, httpx.Client() as idle_client:
        address = f"http://127.0.0.1:{port}"
        assert idle_client.get(f"{address}/health").status_code == 200
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(0.5)
        for get in (idle_client.get, httpx.get):
            refused = get(f"{address}/health", timeout=20)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            assert refused.json()["error"]["message"] == "the server is shutting down: try again later"
        assert server.poll() is None, "it waits for the request that runs"
        connection.sendall(BODY[10:])
        text = read_answer(connection)
        assert text.startswith("HTTP/1.1 200") and '"completion_tokens":' in text
        _, messages = server.communicate(timeout=20)
        assert server.returncode == 143 and "Traceback" not in messages
        assert "clearhead: POST /v1/completions 200 " in messages and "a m" not in messages, "a log without texts"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with process(tmp_path) as (server, port), half_sent(port):
        httpx.get(f"http://127.0.0.1:{port}/health")
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(0.3)
        os.kill(server.pid, signal.SIGTERM)
        server.communicate(timeout=20)
        assert server.returncode == 143


def test_a_schema_that_takes_long_does_not_hold_up_the_end(tmp_path: Path) -> None:
    schema = {"type": "integer", "multipleOf": 10_000_019}
    formats = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": formats}
    with process(tmp_path) as (server, port), ThreadPoolExecutor() as pool:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        waiting = [pool.submit(httpx.post, url, json=body, timeout=120) for _ in range(5)]
        for _ in range(600):
            children = psutil.Process(server.pid).children()
            # More than one: the first one renders the template.
            if len(children) > 1:
                break
            time.sleep(0.05)
        os.kill(server.pid, signal.SIGTERM)
        assert {future.result().status_code for future in waiting} == {503}
        server.communicate(timeout=60)
        assert server.returncode == 143 and len(children) > 1
        assert not psutil.wait_procs(children, timeout=20)[1]


def test_more_connections_than_files_are_one_line_of_the_log(tmp_path: Path) -> None:
    with process(tmp_path, files=128) as (server, port), contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
        os.kill(server.pid, signal.SIGTERM)
        _, messages = server.communicate(timeout=60)
    assert messages.count("connections are open") == 1 and len(messages) < 1000, messages
