"""The real client of the hub against a server on this machine: what is found, what is refused, what the cache holds."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from clearhead.core import build
from clearhead.errors import InputError
from clearhead.hf.files.hub import find_checkpoint
from clearhead.hf.saving import save_module
from clearhead.presets.hyperparameters import Hyperparameters, build_spec
from tests.conftest import ROOT

COMMITS = {"main": "1" * 40, "v2": "2" * 40}


@dataclass
class Hub:
    """Repositories in memory, answered as the hub does, and what was asked."""

    files: dict[tuple[str, str], dict[str, bytes]]
    refused: dict[str, tuple[int, str]]
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def reply(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.partition("?")[0].strip("/").split("/")
        is_api = parts[0] == "api"
        parts = parts[2:] if is_api else parts
        # An old name has no owner.
        length = next((at for at, part in enumerate(parts) if part in ("resolve", "revision", "tree")), len(parts))
        repository, (action, *parts) = "/".join(parts[:length]), parts[length:] or [""]
        if repository in self.refused:
            status, code = self.refused[repository]
            return status, {"X-Error-Code": code} if code else {}, b"{}"
        revision = parts[0] if parts else "main"
        commit = COMMITS.get(revision, revision)
        files = self.files.get((repository, commit))
        if files is None:
            known = any(name == repository for name, _ in self.files)
            return 404, {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"}, b"{}"
        if is_api:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            found = {"id": repository, "sha": commit, "siblings": siblings, "private": False, "tags": []}
            listing = [{"type": "file", "path": one["rfilename"], "size": one["size"], "oid": "0"} for one in siblings]
            content = json.dumps(listing if action == "tree" else found).encode()
            return 200, {"Content-Type": "application/json"}, content
        content = files.get("/".join(parts[1:]))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, content


class Handler(BaseHTTPRequestHandler):
    def __init__(self, hub: Hub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        status, headers, content = self.hub.reply(self.path)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass


def checkpoint(folder: Path, rows: int) -> dict[str, bytes]:
    hparams = Hyperparameters(
        family="decoder", layers=1, width=14, heads=2, feedforward=19, positions="learned", max_positions=11,
        norm_place="pre", activation="gelu_tanh", embedding_scale=1.0, tie="decoder",
    )  # fmt: skip
    save_module(build(build_spec(hparams, source_vocab=rows, target_vocab=rows)), folder, model_type="gpt2")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, str]]:
    root = tmp_path_factory.mktemp("hub")
    first, second = checkpoint(root / "one", 23), checkpoint(root / "two", 29)
    pickled = {"config.json": first["config.json"], "pytorch_model.bin": b"not read", "README.md": b"not fetched"}
    files = {
        ("someone/model", COMMITS["main"]): {**first, "README.md": b"not fetched", "model.onnx": b"not fetched"},
        ("someone/model", COMMITS["v2"]): second,
        ("someone/pickled", COMMITS["main"]): pickled,
        ("old", COMMITS["main"]): second,
    }
    refused = {
        "someone/gated": (403, "GatedRepo"),
        "someone/gated-too": (401, "GatedRepo"),
        "someone/private": (401, "RepoNotFound"),
        "someone/broken": (500, ""),
    }
    found = Hub(files, refused)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, found))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def run(endpoint: str, home: Path, *references: str, offline: bool = False) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "hf_of_a_test", "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hf.files.hub_job", *references],
        capture_output=True, text=True, check=False, timeout=240, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {one["asked"]: one for one in map(json.loads, done.stdout.splitlines())}


def test_what_the_hub_has_is_found_and_what_it_refuses_is_said(hub: tuple[Hub, str], tmp_path: Path) -> None:
    server, endpoint = hub
    found = run(
        endpoint, tmp_path, "someone/model", "someone/model@v2", "someone/model@v9", "someone/nothing",
        "someone/gated", "someone/gated-too", "someone/private", "someone/broken", "someone/pickled",
        "+someone/pickled", "old",
    )  # fmt: skip
    assert found["someone/model"]["names"] == ["config.json", "model.safetensors"], "what is not wanted is not fetched"
    assert (found["someone/model"]["rows"], found["someone/model@v2"]["rows"]) == (23, 29)
    assert found["old"]["rows"] == 29, "a name without an owner"
    words = {
        "someone/model@v9": "the Hugging Face hub has no revision 'v9' of someone/model",
        "someone/nothing": "the Hugging Face hub has no repository of that name; a private one needs HF_TOKEN",
        "someone/gated": "restricts access to it: accept its terms there and set HF_TOKEN",
        "someone/gated-too": "restricts access to it",
        "someone/private": "has no repository of that name",
        "someone/broken": "answers with the error 500",
        "someone/pickled": "clearhead convert someone/pickled OUT --from-bin",
    }
    for reference, sentence in words.items():
        assert sentence in found[reference]["error"] and "\n" not in found[reference]["error"], found[reference]
    assert "pytorch_model.bin" in found["+someone/pickled"]["names"], "a conversion asks for it by name"
    assert "Bearer hf_of_a_test" in server.tokens

    asked = len(server.asked)
    cached = run(
        endpoint, tmp_path, "someone/model", "someone/model@v2", "someone/nothing", "modle", "old", offline=True
    )
    assert (cached["someone/model"]["rows"], cached["someone/model@v2"]["rows"]) == (23, 29)
    assert cached["old"]["rows"] == 29
    assert "is switched off by HF_HUB_OFFLINE, and its cache lacks it: unset that" in cached["someone/nothing"]["error"]
    assert f"{ROOT} has no 'modle' (did you mean 'someone/model'?)" in cached["modle"]["error"]
    assert len(server.asked) == asked, "offline nothing is asked"

    nowhere = run("http://127.0.0.1:9", tmp_path, "someone/model", "someone/nothing")
    assert nowhere["someone/model"]["rows"] == 23, "without a network the cache answers"
    assert "cannot be reached, and its cache lacks it: connect, or name a run" in nowhere["someone/nothing"]["error"]


@pytest.mark.parametrize("reference", ["", "a" * 256, f"someone/{'b' * 256}", "ä" * 128])
def test_a_name_that_no_file_can_have_is_refused(reference: str) -> None:
    with pytest.raises(InputError, match="more than 255 bytes" if reference else "the reference is empty: name a run"):
        find_checkpoint(reference)
