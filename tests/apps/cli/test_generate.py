"""`clearhead generate` shows text as it comes, and refuses what contradicts itself."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import clearhead
from clearhead.apps.cli.main import main
from clearhead.generate import continuation
from clearhead.generate.options import GenerateOptions, resolve_options
from tests.apps.cli.test_commands import run
from tests.hf_models import language_model

Runs = Callable[[str], Path]
# A shell's background job, as a test run may be, starts with SIGINT ignored, and so would what it starts.
LISTEN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{LISTEN}; import sys; from clearhead.apps.cli.main import main; sys.exit(main())"]


def run_refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    assert main(list(arguments)) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize("options", [["--greedy"], ["--temperature", "0.7", "--top-k", "5", "--seed", "3"]])
def test_the_stream_is_the_text(options: list[str], runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    ref = str(runs("generate"))
    out = run(capfd, "generate", ref, "--prompt", "a m u", "--max-new-tokens", "13", *options)
    chosen: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "seed": 3} if "--seed" in options else {"temperature": 0}
    (expected,) = clearhead.load(ref).generate("a m u", max_new_tokens=13, **chosen)
    assert expected.text and out.removesuffix("\n") == expected.text.removesuffix("\n") and out.endswith("\n")


def test_options_reach_the_model(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Recorder:
        def generate_options(self, **options: Any) -> GenerateOptions:
            return resolve_options(GenerateOptions, options, {})

        def generate(self, prompts: list[str], **options: Any) -> list[list[object]]:
            seen.update(options, prompts=prompts)
            return [[] for _ in prompts]

    monkeypatch.setattr(clearhead, "load", lambda *_, **__: Recorder())
    monkeypatch.setattr("clearhead.apps.cli.options.locate_model", str)
    run(
        capfd, "generate", "r", "--prompt", "a", "--prompt", "b", "--max-new-tokens", "7", "--temperature", "0.5",
        "--top-k", "11", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.3", "--no-repeat-ngram-size",
        "3", "--num-return-sequences", "2", "--stop", "x", "--stop", "y", "--seed", "5", "--batch-size", "2",
        "--encoder-no-repeat-ngram-size", "4", "--min-new-tokens", "6",
    )  # fmt: skip
    assert seen == {
        "prompts": ["a", "b"], "max_new_tokens": 7, "temperature": 0.5, "top_k": 11, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 6,
        "encoder_no_repeat_ngram_size": 4, "num_return_sequences": 2, "stop": ["x", "y"], "seed": 5,
        "batch_size": 2, "chat": False,
    }  # fmt: skip
    seen.clear()
    run(capfd, "generate", "r", "--beam-size", "3", "--length-penalty", "0.6")
    assert seen == {"prompts": [""], "beam_size": 3, "length_penalty": 0.6, "chat": False}


def test_a_long_prompt_is_said_before_it_is_read(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuation, "LONG_PROMPT", 9)
    for prompt, notice in {"a m u": "", "a m u a m u": "clearhead: reading a prompt of 12 tokens"}.items():
        assert main(["generate", str(runs("generate")), "--prompt", prompt, "--max-new-tokens", "2", "--greedy"]) == 0
        assert capfd.readouterr().err.partition(";")[0] == notice


def test_a_seed_gives_the_same_text_again(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    ref = str(runs("generate"))
    texts = [run(capfd, "generate", ref, "--max-new-tokens", "29", "--seed", seed) for seed in ("3", "3", "4")]
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_file_is_the_prompt(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, text = str(runs("generate")), "a m u\nb n v"
    (tmp_path / "prompt").write_text(f"{text}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n".encode())))
    options = ("--max-new-tokens", "5", "--seed", "3", "--json")
    records = [
        json.loads(run(capfd, "generate", ref, *prompt, *options))
        for prompt in (["--prompt", text], ["--prompt-file", str(tmp_path / "prompt")], ["--prompt-file", "-"])
    ]
    assert records[0] == records[1] == records[2] and records[0]["prompt"] == text


def test_no_prompt_begins_a_text(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    ref = str(runs("generate"))
    options = ("--max-new-tokens", "5", "--greedy")
    assert run(capfd, "generate", ref, *options) == run(capfd, "generate", ref, "--prompt", "", *options)


@pytest.mark.parametrize("options", [[], ["--json"], ["--prompt", "a", "--prompt", "b"]])
def test_without_options_it_samples_and_says_from_which_seed(
    options: list[str], runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(runs("generate")), "--max-new-tokens", "29", *options]
    assert main(words) == 0
    captured = capfd.readouterr()
    (drawn_seed,) = re.findall(r"^sampled with temperature 0.8, top-p 0.95, seed (\d+);.*\n", captured.err)
    assert main([*words, "--seed", drawn_seed]) == 0
    again = capfd.readouterr()
    assert (again.out, again.err) == (captured.out, captured.err)
    assert main(words) == 0 and capfd.readouterr().out != captured.out


@pytest.mark.parametrize("options", [["--greedy"], ["--beam-size", "2"]])
def test_nothing_is_said_where_nothing_is_sampled(
    options: list[str], runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(runs("generate")), "--max-new-tokens", "5", *options]
    for _ in range(2):
        assert main(words) == 0 and capfd.readouterr().err == ""


def test_json_has_one_object_for_each_sequence(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--num-return-sequences", "3", "--max-new-tokens", "5", "--seed", "2", "--json"]
    out = run(capfd, "generate", str(runs("generate")), "--prompt", "a m", "--prompt", "b", *options)
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["index"] for record in records] == [0, 0, 0, 1, 1, 1]
    assert [record["prompt"] for record in records] == ["a m"] * 3 + ["b"] * 3
    for record in records:
        assert set(record) == {"index", "prompt", "text", "tokens", "score", "stop_reason", "seed"}
        assert record["seed"] == 2
        assert 1 <= len(record["tokens"]) <= 5 and record["stop_reason"] in ("end", "length") and record["score"] < 0


@pytest.mark.parametrize(
    "prompt_options", [[], ["--json"], ["--num-return-sequences", "2", "--temperature", "1.0", "--seed", "3"]]
)
def test_a_text_that_is_cut_under_a_schema_ends_with_1(
    prompt_options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, schema = language_model(tmp_path / "m"), tmp_path / "schema.json"
    chosen = prompt_options if "--seed" in prompt_options else ["--greedy", *prompt_options]
    command = [
        "generate",
        str(folder),
        "--prompt",
        "the cat",
        "--max-new-tokens",
        "5",
        "--schema",
        str(schema),
        *chosen,
    ]
    schema.write_text('{"const": 12}')
    out = run(capfd, *command)
    assert "12" in out
    schema.write_text('{"type": "array", "minItems": 40}')
    assert main(command) == 1
    captured = capfd.readouterr()
    assert "[" in captured.out and "reached the length limit before the JSON was complete" in captured.err
    assert ("2 of 2" if "--seed" in prompt_options else "1 of 1") in captured.err and "--max-new-tokens" in captured.err


def test_several_sequences_stand_apart(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--beam-size", "3", "--num-return-sequences", "2", "--max-new-tokens", "5"]
    out = run(capfd, "generate", str(runs("generate")), "--prompt", "a m", *options)
    texts = [
        sequence.text
        for sequence in clearhead.load(runs("generate")).generate(
            "a m", beam_size=3, num_return_sequences=2, max_new_tokens=5
        )
    ]
    assert out == "\n---\n".join(texts) + "\n"


def test_a_model_with_an_encoder_goes_on_from_what_it_read(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "generate", str(runs("prefix")), "--prompt", "a m", "--max-new-tokens", "5", "--seed", "1")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--temperature", "0", "--top-k", "3", "--top-p", "0.9"], ["--top-k is 3", "--top-p is 0.9"]),
        (["--greedy", "--seed", "3"], ["--seed is 3"]),
        (["--greedy", "--temperature", "0.5"], ["give one of them"]),
        (["--beam-size", "3", "--seed", "1", "--stop", "x"], ["--seed is 1", "--stop is ['x']"]),
        (["--beam-size", "2", "--num-return-sequences", "3"], ["raise --beam-size to at least 3"]),
        (["--top-p", "1.5", "--max-new-tokens", "0"], ["--top-p must be", "--max-new-tokens must be"]),
        (["--length-penalty", "0.5"], ["--length-penalty is 0.5, which has no effect here"]),
        (["--penalty-alpha", "0.6"], ["no such option: --penalty-alpha: contrastive search is not supported"]),
        (["--temperature", "warm"], ["--temperature expects a number, got 'warm'"]),
        (["--prompt", "a", "--prompt-file", "f"], ["--prompt and --prompt-file both give the prompt"]),
        (["--prompt-file", "nowhere"], ["nowhere: there is no such file"]),
        (["--prompt", "a", "--batch-size", "3"], ["--batch-size has no effect on a single prompt"]),
    ],
)
def test_what_cannot_be_done_is_named_before_a_model_is_loaded(
    arguments: list[str], expected: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    message = run_refused(capfd, "generate", "no-such-run", *arguments)
    assert all(words in message for words in expected), message
    assert "no-such-run" not in message


@pytest.mark.parametrize("kind", ["fill", "classify", "embed"])
def test_a_model_that_says_no_next_token(kind: str, runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    assert "generation needs a model with a decoder" in run_refused(capfd, "generate", str(runs(kind)), "--prompt", "a")


class _Stream:
    """A model that was trained here and whose stream is cut off."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def generate_options(self) -> GenerateOptions:
        return GenerateOptions()

    def stream(self, prompt: str, *, chat: bool) -> Iterator[str]:
        yield "a m"
        yield " u"
        raise self.error


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (clearhead.RunFailure("not a number"), 1), (SystemExit(143), 143)]
)
def test_what_was_shown_stays(
    error: BaseException, code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearhead, "load", lambda *_, **__: _Stream(error))
    monkeypatch.setattr("clearhead.apps.cli.options.locate_model", str)
    assert main(["generate", "r", "--prompt", "x"]) == code
    captured = capfd.readouterr()
    assert captured.out == "a m u\n" and "Traceback" not in captured.err


def test_ctrl_c_while_streaming(runs: Runs) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", str(runs("generate")), "--prompt", "a m", "--max-new-tokens", "1000000", "--seed", "1",
         "--repetition-penalty", "0.01"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert first and (first + out).endswith(b"\n") and b"Traceback" not in err and b"interrupted" in err
