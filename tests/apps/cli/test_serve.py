"""`clearhead serve`: how models are named, and what its start prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest

from clearhead.apps.cli.main import main
from clearhead.apps.cli.serve import _lines, _name_models
from clearhead.apps.serve.api.served import Models, ServedModel
from clearhead.base.errors import InputError
from tests.apps.serve.api.conftest import MAKERS, address, locked, models

__all__ = ["address", "locked", "models"]


def test_a_name_goes_before_its_reference(tmp_path: Path) -> None:
    for folder in ("a/model", "b/model", "lr=0.1", "models--own--tiny/snapshots/0123abcd"):
        (tmp_path / folder).mkdir(parents=True)
    first, second = f"{tmp_path}/a/model", f"{tmp_path}/b/model"
    assert _name_models([first]) == {"model": first}
    assert _name_models([first, f"The-2nd_v1.0={second}"]) == {"model": first, "The-2nd_v1.0": second}
    # A path that exists as it is written is no name, with a label or without one.
    assert _name_models([f"{tmp_path}/lr=0.1@best"]) == {"lr=0.1": f"{tmp_path}/lr=0.1@best"}
    assert _name_models([f"run={tmp_path}/lr=0.1"]) == {"run": f"{tmp_path}/lr=0.1"}
    snapshot = f"{tmp_path}/models--own--tiny/snapshots/0123abcd"
    assert _name_models([snapshot, "small=owner/name@v1", "owner/name"]) == {
        "tiny": snapshot, "small": "owner/name@v1", "name": "owner/name",
    }  # fmt: skip
    with pytest.raises(InputError, match=rf"two models have the name 'model': name one of them, such as b={second}"):
        _name_models([first, second])
    for wrong in ("a b", "ü", "", "..", "a/b"):
        with pytest.raises(InputError, match="cannot name a model: use letters, digits"):
            _name_models([f"{wrong}={first}"])


def test_two_models_of_one_name_are_refused_before_any_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "x=nowhere", "x=nowhere-else", "--port", "0"]) == 2
    assert "two models have the name 'x'" in capfd.readouterr().err


def test_beyond_positions_needs_a_model_with_a_declared_length(
    models: Models, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = models.get("lm").model.hf_checkpoint
    assert checkpoint is not None
    assert main(["serve", f"lm={checkpoint.folder}", "--port", "0", "--beyond-positions"]) == 2
    assert "--beyond-positions has no effect" in capfd.readouterr().err


def test_an_open_address_without_keys_is_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nowhere", "--port", "0", "--host", "0.0.0.0"]) == 2
    first = capfd.readouterr().err.splitlines()[0]
    assert first == "warning: 0.0.0.0 may be open to other machines without a key: give --api-key-file"


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_first_request_that_is_shown_is_answered(name: str, models: Models, locked: str, tmp_path: Path) -> None:
    """The line goes through a shell, with the key from its file; each model has a line with its limits."""
    keys = tmp_path / "the keys.txt"
    keys.write_text("\nfirst-key\nsecond-key\n")
    some = Models([models.get(name), models.get("lm")], {})
    *lines, request = _lines(some, "0.0.0.0", int(locked.rpartition(":")[2]), keys)
    # Both keep their places where they are one.
    assert lines[0].startswith(f"{name}: {models.get(name).model.task.kind}, float32, ") and " tokens" in lines[0]
    shell = 'curl() { printf "%s\\0" "$@"; }; ' + request
    done = subprocess.run(["bash", "-c", shell], capture_output=True, check=True)
    url, *options = done.stdout.decode().split("\0")[:-1]
    headers = dict(
        value.split(": ", 1) for flag, value in zip(options[::2], options[1::2], strict=True) if flag == "-H"
    )
    assert options[-2] == "-d" and headers["Authorization"] == "Bearer first-key"
    answer = httpx.post(url, content=options[-1].encode(), headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def test_the_line_of_a_model_has_its_limits(models: Models) -> None:
    by_name = {name: _lines(Models([models.get(name)], {}), "127.0.0.1", 80, None)[0] for name in ("lm", "mt", "sent")}
    assert "at most 61 tokens with the prompt" in by_name["lm"]
    assert "texts of at most 47 tokens" in by_name["mt"]
    assert "texts of at most " in by_name["sent"]
    lifted = ServedModel("lm", models.get("lm").model, beyond_positions=True)
    assert "Authorization" not in _lines(Models([lifted], {}), "::", 80, None)[-1]
    assert "http://[::1]:80/v1/completions" in _lines(Models([lifted], {}), "::", 80, None)[-1]
