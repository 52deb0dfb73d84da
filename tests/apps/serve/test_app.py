"""Access to the live page, answers to mistakes, and the end of computations after a disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.apps.serve.explorer import LivePage, listen
from clearhead.apps.serve.gate import MOST_BYTES
from clearhead.apps.serve.work import ClientDisconnected, Work, Workers
from clearhead.base.errors import InputError
from tests.apps.serve.cases import Browser, model_of, text_of


@pytest.fixture(scope="module")
def browser() -> Browser:
    return Browser(model_of("gpt2"))


def refusal(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


def test_the_page_comes_with_its_policy(browser: Browser) -> None:
    answer = browser.get("")
    assert answer.status_code == 200
    assert "connect-src 'self'" in answer.text and "default-src 'none'" in answer.text
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["cache-control"] == "no-store"


def test_nothing_is_answered_without_the_token(browser: Browser) -> None:
    for path in ("/", "/read", f"/{browser.access.token[:-1]}/", f"/{browser.access.token}x/", "/é/"):
        code, sentence = refusal(browser.client.get(path))
        assert code == 403 and "token" in sentence


@pytest.mark.parametrize("path", ["*", "foo", ""])
def test_a_target_that_is_no_path_is_refused(browser: Browser, path: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    host = (b"host", browser.access.address.split("/")[2].encode())
    scope = {"type": "http", "method": "OPTIONS", "path": path, "headers": [host], "query_string": b""}
    asyncio.run(browser.client.app(scope, None, send))
    assert sent[0]["status"] == 400 and b"must be a path" in sent[1]["body"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "127.0.0.1:8765.evil.example"])
def test_another_host_is_refused(browser: Browser, host: str) -> None:
    answer = browser.client.get(f"/{browser.access.token}/", headers={"Host": host})
    assert refusal(answer)[0] == 400


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8765", "http://localhost:8888"])
def test_another_origin_is_refused(browser: Browser, origin: str) -> None:
    answer = browser.client.post(f"/{browser.access.token}/read", json={"text": "a"}, headers={"Origin": origin})
    assert refusal(answer)[0] == 403
    same_origin = {"Origin": "http://localhost:8765", "Host": "localhost:8765"}
    assert (
        browser.client.post(f"/{browser.access.token}/read", json={"text": "a b"}, headers=same_origin).status_code
        == 200
    )


def test_a_large_request_is_refused(browser: Browser) -> None:
    assert refusal(browser.post("read", text="a" * MOST_BYTES))[0] == 413
    parts = browser.client.post(f"/{browser.access.token}/read", content=iter([b"a" * MOST_BYTES, b"a"]))
    assert refusal(parts)[0] == 413, "a body of unknown length"


MIXED = "decoder.layers.0.steps.0.branches.0.function.mixed"
MISTAKES = [
    ({"text": ""}, "the text is empty"),
    ({"text": "a" * 90}, "tokens, but the model has"),
    ({"text": "a", "target": "b"}, "a target needs a model with encoder and decoder"),
    ({"text": "a", "edits": [{"address": MIXED.replace("mixed", "mixd")}]}, f"did you mean '{MIXED}'"),
    ({"text": "a", "edits": [{"address": MIXED, "head": 99}]}, "has no head 99; it has 0 to"),
    ({"text": "a", "edits": [{"address": "decoder.final_norm", "head": 0}]}, "has no axis of heads"),
    ({"text": "ab", "edits": [{"address": MIXED, "positions": [3]}]}, "position 3 is not in the decoder"),
    ({"text": "ab", "edits": [{"address": "decoder.embedded", "positions": [0]}]}, "outside the layers"),
    ({"text": "ab", "edits": [{"address": MIXED.replace("mixed", "weights"), "positions": [0]}]}, ""),
    ({"text": "ab", "edits": [{"address": "decoder.*.0.after", "kind": "patch"}]}, "the text is empty"),
    ({"text": "ab", "edits": [{"address": "decoder.**", "kind": "patch", "text": "b"}]}, "a patch needs the address"),
    ({"text": "ab", "edits": [{"address": MIXED, "factor": "torch.exp"}]}, "edits.0.factor: "),
    ({"text": "ab", "edits": [{"address": MIXED, "code": "1"}]}, "edits.0.code: extra inputs are not permitted"),
    ({"words": "ab"}, "text: field required"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), MISTAKES)
def test_a_mistake_is_one_sentence(browser: Browser, body: dict[str, Any], expected: str) -> None:
    answer = browser.post("read", **body)
    if not expected:
        assert answer.status_code == 200, "weights have queries as their second last axis"
        return
    code, sentence = refusal(answer)
    assert code in (400, 422) and expected in sentence and "\n" not in sentence


def test_an_edit_of_the_wrong_shape_names_the_shape() -> None:
    browser = Browser(model_of("marian"))
    keys = "decoder.layers.0.steps.1.branches.0.function.keys"
    code, sentence = refusal(browser.post("read", text="abc", target="a", edits=[{"address": keys, "positions": [0]}]))
    assert code == 400 and "without an axis for the tokens" in sentence


def test_pieces_that_there_are_not(browser: Browser) -> None:
    name = browser.read(text="abc")["name"]
    assert "there is no array" in refusal(browser.get(f"blob/{name}/999"))[1]
    assert "reload" in refusal(browser.get("blob/unknown/0"))[1]
    query = {"stack": "decoder.self", "layer": 0, "head": 0}
    assert refusal(browser.get(f"tile/{name}", **query, row=9))[0] == 400
    assert "did you mean" in refusal(browser.get(f"tile/{name}", **{**query, "stack": "decoder.sel"}))[1]


def test_a_port_in_use_is_said() -> None:
    with listen(0) as taken:
        with pytest.raises(InputError, match="is in use by another program: choose another"):
            listen(taken.getsockname()[1])


class Gone:
    """Request whose client disconnects after a while."""

    def __init__(self, after: float) -> None:
        self.until = time.monotonic() + after

    async def is_disconnected(self) -> bool:
        return time.monotonic() > self.until


def test_a_computation_ends_when_its_browser_leaves() -> None:
    """The model runs for long; each layer checks whether the client is still connected."""
    before, model, workers, runs = set(threading.enumerate()), model_of("gpt2"), Workers(), list[float]()
    ids = torch.ones(1, 5, dtype=torch.long)

    def endless(work: Work) -> None:
        with work.watching(model), torch.no_grad():
            while len(runs) < 10**6:
                model.module(ids)
                runs.append(time.monotonic())

    with pytest.raises(ClientDisconnected):
        asyncio.run(workers.compute(Gone(0.2), endless))  # type: ignore[arg-type]
    assert runs and workers.num_running == 0
    workers.join()
    assert set(threading.enumerate()) <= before


def test_a_slow_computation_lets_a_quick_one_go_first() -> None:
    workers, order = Workers(), list[str]()

    def slow(work: Work) -> None:
        for _ in range(200):
            work.check()
            order.append("slow")
            time.sleep(0.005)

    def quick(work: Work) -> None:
        for _ in range(5):
            order.append("quick")
            time.sleep(0.02)

    async def both() -> None:
        first = asyncio.create_task(workers.compute(Gone(99), slow))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        await workers.compute(Gone(99), quick, is_quick=True)  # type: ignore[arg-type]
        workers.close()
        with pytest.raises(ClientDisconnected):
            await first

    asyncio.run(both())
    begun, ended = order.index("quick"), len(order) - 1 - order[::-1].index("quick")
    assert order[begun : ended + 1].count("slow") <= 1
    workers.join()


# A test run in the background starts with SIGINT ignored, and so would what it starts.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from clearhead.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it(number: int, code: int, saved_model: Path) -> None:
    """A signal ends it even while a page waits for a computation; the exit code is that of the signal."""
    command = [sys.executable, "-c", PROGRAM, "view", str(saved_model), "ab", "--serve"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    address = started.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
    with urllib.request.urlopen(address) as answer:
        assert b"</html>" in answer.read()
    request = urllib.request.Request(
        f"{address}read", b'{"text": "ab", "generate": 1000}', {"Content-Type": "application/json"}
    )
    waiting = threading.Thread(target=_ignore, args=(request,))
    waiting.start()
    time.sleep(0.3)
    os.kill(started.pid, number)
    _, messages = started.communicate(timeout=20)
    waiting.join()
    assert started.returncode == code
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert messages.splitlines()[-1] == f"clearhead: {word}" and "Traceback" not in messages


def _ignore(request: urllib.request.Request) -> None:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request).read()


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    model_of("gpt2").save(path)
    return path


def test_a_notebook_shows_the_page_until_it_is_closed() -> None:
    before = set(threading.enumerate())
    page = LivePage(model_of("gpt2"), "ab")
    assert f'src="{page.address}"' in page._repr_html_()
    with urllib.request.urlopen(page.address) as answer:
        assert b"</html>" in answer.read()
        assert "http://localhost:*" in answer.headers["Content-Security-Policy"]
    page.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError):
        urllib.request.urlopen(page.address)


def test_texts_are_those_of_the_model(browser: Browser) -> None:
    """The live page of a text equals its saved page."""
    answer = browser.read(text=text_of(browser.runs.model))
    (sample,) = answer["page"]["samples"]
    assert {stack["measure"][:8] for stack in sample["attentions"]} == {"attentio", "weight t", "rollout:"}
    assert sample["lens"] is not None and sample["columns"]
