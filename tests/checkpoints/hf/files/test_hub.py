"""The real client of the hub against a server on this machine: downloads, refusals and the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.saving import save_module
from clearhead.checkpoints.reference import ModelReference
from clearhead.core import build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from tests.checkpoints.hf.files.fake_hub import COMMITS, Hub, job, serving
from tests.conftest import ROOT


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
    with serving(Hub(files, refused)) as endpoint:
        yield endpoint


def run(endpoint: str, home: Path, *references: str, offline: bool = False) -> dict[str, dict[str, Any]]:
    done = job(endpoint, home, "tests.checkpoints.hf.files.hub_job", *references, offline=offline)
    assert done.returncode == 0, done.stderr
    return {answer["asked"]: answer for answer in map(json.loads, done.stdout.splitlines())}


def test_what_the_hub_has_is_found_and_what_it_refuses_is_said(hub: tuple[Hub, str], tmp_path: Path) -> None:
    server, endpoint = hub
    answers = run(
        endpoint, tmp_path, "someone/model", "someone/model@v2", "someone/model@v9", "someone/nothing",
        "someone/gated", "someone/gated-too", "someone/private", "someone/broken", "someone/pickled",
        "+someone/pickled", "old",
    )  # fmt: skip
    assert answers["someone/model"]["names"] == ["config.json", "model.safetensors"], (
        "what is not wanted is not fetched"
    )
    assert (answers["someone/model"]["rows"], answers["someone/model@v2"]["rows"]) == (23, 29)
    assert answers["old"]["rows"] == 29, "a name without an owner"
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
        assert sentence in answers[reference]["error"] and "\n" not in answers[reference]["error"], answers[reference]
    assert "pytorch_model.bin" in answers["+someone/pickled"]["names"], "a conversion asks for it by name"
    assert "Bearer hf_of_a_test" in server.tokens

    num_requests = len(server.requests)
    cached = run(
        endpoint, tmp_path, "someone/model", "someone/model@v2", "someone/nothing", "modle", "old", offline=True
    )
    assert (cached["someone/model"]["rows"], cached["someone/model@v2"]["rows"]) == (23, 29)
    assert cached["old"]["rows"] == 29
    assert "is switched off by HF_HUB_OFFLINE, and no copy is cached: unset that" in cached["someone/nothing"]["error"]
    assert f"{ROOT} has no 'modle' (did you mean 'someone/model'?)" in cached["modle"]["error"]
    assert len(server.requests) == num_requests, "offline nothing is asked"

    nowhere = run("http://127.0.0.1:9", tmp_path, "someone/model", "someone/nothing")
    assert nowhere["someone/model"]["rows"] == 23, "without a network the cache answers"
    assert "cannot be reached, and no copy is cached: connect, or name a run" in nowhere["someone/nothing"]["error"]


@pytest.mark.parametrize("reference", ["", "a" * 256, f"someone/{'b' * 256}", "ä" * 128])
def test_a_name_that_no_file_can_have_is_refused(reference: str) -> None:
    with pytest.raises(InputError, match="at most 255 bytes" if reference else "the reference is empty: name a run"):
        ModelReference.locate(reference)


class Strange(Hub):
    """A server that answers unlike a hub."""

    def reply(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if "someone/circling" in path:
            return 302, {"Location": path}, b""
        answers = {"list": [1, 2], "keys": {"sha": "1" * 40, "siblings": [{}]}, "number": 3, "commit": {"id": "x"}}
        name = next((name for name in answers if f"someone/{name}" in path), None)
        if name is None or "/api/" not in path:
            return 200, {"Content-Type": "text/html"}, b"<html>sign in</html>"
        return 200, {"Content-Type": "application/json"}, json.dumps(answers[name]).encode()


def test_answers_that_no_hub_gives_are_refused_in_a_sentence(tmp_path: Path) -> None:
    names = [f"someone/{name}" for name in ("circling", "list", "keys", "number", "commit", "page")]
    with serving(Strange({}, {})) as (_, endpoint):
        answers = run(endpoint, tmp_path, *names)
    for name in names:
        assert "the Hugging Face hub sent an unexpected answer" in answers[name]["error"], answers[name]
        assert "\n" not in answers[name]["error"] and len(answers[name]["error"]) < 600
