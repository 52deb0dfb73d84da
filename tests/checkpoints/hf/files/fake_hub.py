"""A hub on this machine, for the real client: repositories in memory, what was asked, and what was uploaded."""

from __future__ import annotations

import base64
import contextlib
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
from urllib.parse import parse_qs, unquote

from tests.conftest import ROOT

TOKEN = "hf_of_a_test"
COMMITS = {"main": "1" * 40, "v2": "2" * 40, "refs/pr/2": "3" * 40}


def _json(content: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _describe_file(name: str, content: bytes) -> dict[str, object]:
    return {
        "type": "file",
        "path": name,
        "size": len(content),
        "oid": hashlib.sha1(content, usedforsecurity=False).hexdigest(),
    }


@dataclass
class Hub:
    """Repositories in memory, answered as the hub does, and what was asked."""

    files: dict[tuple[str, str], dict[str, bytes]]
    refused: dict[str, tuple[int, str]]
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def take(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Take an upload: all files in one commit, in place of those before."""
        parts = unquote(path.partition("?")[0]).strip("/").split("/")
        if parts[4:5] == ["paths-info"]:
            files = self.files["/".join(parts[1:4]), COMMITS.get(parts[-1], parts[-1])]
            wanted = parse_qs(body.decode())["paths"] if b"=" in body else json.loads(body)["paths"]
            return _json([_describe_file(name, files[name]) for name in wanted if name in files])
        if parts[1] == "validate-yaml":
            return _json({"errors": [], "warnings": []})
        if parts[1:] == ["repos", "create"]:
            request = json.loads(body)
            name = f"{request.get('organization') or 'someone'}/{request['name']}"
            if name in self.refused:
                status, code = self.refused[name]
                return status, {"X-Error-Code": code} if code else {}, b"{}"
            self.files.setdefault((name, COMMITS["main"]), {})
            return _json({"url": f"/{name}", "name": name})
        name, action = "/".join(parts[2:4]), parts[4]
        if action == "preupload":
            answer = {"uploadMode": "regular", "shouldIgnore": False}
            return _json({"files": [{"path": entry["path"], **answer} for entry in json.loads(body)["files"]]})
        assert action == "commit", path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.files[name, COMMITS["main"]][line["value"]["path"]] = content
        return _json({"commitUrl": f"/{name}/commit/{COMMITS['main']}", "commitOid": COMMITS["main"]})

    def reply(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = [unquote(segment) for segment in path.partition("?")[0].strip("/").split("/")]
        is_api = parts[0] == "api"
        # Data sets stand under their own prefix, models under none.
        parts = parts[2 if parts[1] == "models" else 1 :] if is_api else parts
        # An old name has no owner.
        length = next(
            (at for at, segment in enumerate(parts) if segment in ("resolve", "revision", "tree")), len(parts)
        )
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
            info = {"id": repository, "sha": commit, "siblings": siblings, "private": False, "tags": []}
            under = "".join(f"{segment}/" for segment in parts[1:])
            listing = [_describe_file(name, content) for name, content in files.items() if name.startswith(under)]
            if "recursive=true" not in path.lower():
                inner = {str(entry["path"])[len(under) :].partition("/") for entry in listing}
                folders = {f"{under}{name}" for name, sign, _ in inner if sign}
                listing = [entry for entry in listing if "/" not in str(entry["path"])[len(under) :]]
                listing += [{"type": "directory", "path": name, "size": 0, "oid": "0"} for name in sorted(folders)]
            content = json.dumps(listing if action == "tree" else info).encode()
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
        self.hub.requests.append(f"{self.command} {self.path}")
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        status, headers, content = self.hub.reply(self.path)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        length = self.headers["Content-Length"]
        body = self._chunks() if length is None else self.rfile.read(int(length))
        status, headers, content = self.hub.take(self.path, body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[tuple[Hub, str]]:
    """Serve a hub, and give its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, hub))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def job(
    endpoint: str, home: Path, module: str, *arguments: str, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a module in a process whose surroundings say which hub there is."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, check=False, timeout=240, cwd=ROOT, env=environment,
    )  # fmt: skip
