"""`clearhead serve` under load, compared with other servers: one client, and many clients at once.

pip install gguf ctranslate2 sentence-transformers
python benchmarks/serve_load.py [--llama-server PATH] [--clients 16] [--requests 64] [--rounds 6] [--only generate]
    [--texts FILE]

Models: GPT-2 of 124M parameters and a Marian of 6 + 6 layers with random weights, both in int8, and MiniLM. The servers
run in turns, each in its own process, with the same number of threads. Prompts have 32 words, continuations 64 tokens,
greedy. Times of the first token and between tokens are measured by the client in a stream. Sentences are translated
greedily into 25 tokens. Each request embeds one text (--texts: a file with one text per line). llama.cpp's server runs
with Q8_0 and --parallel. The libraries sentence-transformers and CTranslate2 (in 8 bits) run in plain FastAPI
applications (`serve_peers.py`). The versions and instructions of each server are printed. Clients share the processors
with the server, and open a connection for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from inference_cases import TARGET, texts_of
from inference_models import for_ctranslate2, for_llama, gpt2, in_8_bits, marian, minilm, one_token_words
from pairing import Ratio, Spread
from side_by_side import describe, machine

NEW_TOKENS, PROMPT_WORDS = 64, 32


@dataclass
class Times:
    """Times that clients measured in one run: for streams each event, otherwise the answer."""

    seconds: float = 0.0
    whole: list[float] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Server:
    """A server with its requests.

    Args:
        name: the name in the table.
        command: function that returns the command line of the server for a port.
        path: the path of a request.
        body: function that returns the body of a request for its number.
        says: the words that mark lines of its output with versions and instructions.
    """

    name: str
    command: Callable[[int], list[str]]
    path: str
    body: Callable[[int], dict[str, Any]]
    says: tuple[str, ...] = ("system",)


async def ask(port: int, server: Server, number: int, times: Times) -> None:
    """Send one request, and record the times of its events."""
    content = json.dumps(server.body(number)).encode()
    head = f"POST {server.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + content)
    status = await reader.readline()
    assert b" 200 " in status, (status, await reader.read())
    last = None
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            times.first += [now - begun] if last is None else []
            times.between += [now - last] if last is not None else []
            last = now
        elif line.startswith((b"{", b"[")):
            times.answers.append(json.loads(line))
    times.whole.append(time.perf_counter() - begun)
    writer.close()


async def run(port: int, server: Server, clients: int, requests: int, first: int) -> Times:
    """Run clients until all requests are answered."""
    times, waiting = Times(), iter(range(first, first + requests))

    async def client() -> None:
        for number in waiting:
            await ask(port, server, number, times)

    begun = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(clients)])
    times.seconds = time.perf_counter() - begun
    return times


def measure_server(server: Server, clients: int, requests: int, first: int) -> tuple[Times, Times, list[str]]:
    """Start and warm a server, and return the times of one client and of many, and lines about its versions."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        times = _measure_times(server, clients, requests, first, output)
        output.seek(0)
        lines = [line.strip() for line in output if any(word in line for word in server.says)]
        return *times, list(dict.fromkeys(lines))[:8]


def _measure_times(server: Server, clients: int, requests: int, first: int, output: IO[str]) -> tuple[Times, Times]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(server.command(port), stdout=output, stderr=subprocess.STDOUT)
    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise RuntimeError(f"{server.name} ended with {process.returncode}")
            try:
                asyncio.run(run(port, server, 1, 1, first + 10**6))
                break
            except (AssertionError, ConnectionError):
                time.sleep(0.1)
        asyncio.run(run(port, server, clients, clients, first + 2 * 10**6))
        alone = asyncio.run(run(port, server, 1, max(requests // 4, 4), first))
        alone.seconds *= requests / max(requests // 4, 4)
        return alone, asyncio.run(run(port, server, clients, requests, first + requests))
    finally:
        process.terminate()
        process.wait(60)


def servers(options: argparse.Namespace, folder: Path) -> dict[str, list[Server]]:
    """Return the servers for each kind of work, clearhead first."""
    python, threads = sys.executable, str(options.threads)

    def clearhead_command(model: Path) -> Callable[[int], list[str]]:
        return lambda port: [
            python, "-m", "clearhead", "serve", str(model), "--port", str(port), "--threads", threads,
            "--precision", options.precision,
        ]  # fmt: skip

    peer = [python, str(Path(__file__).with_name("serve_peers.py")), threads]
    servers_by_work: dict[str, list[Server]] = {}
    if "generate" in options.only:
        model = gpt2(folder / "gpt2", options.tokenizer)
        words = one_token_words(model)

        def completion(number: int) -> dict[str, Any]:
            prompt = " " + " ".join(random.Random(number).choices(words, k=PROMPT_WORDS))
            return {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}

        servers_by_work["generate"] = [
            Server(
                "clearhead",
                clearhead_command(in_8_bits(model, folder / "gpt2-int8")),
                "/v1/completions",
                completion,
                (", at http://",),
            )
        ]
        if options.llama_server is not None:
            file = for_llama(model, folder / "gpt2.gguf", "Q8_0")
            flags = ["--parallel", str(options.clients), "--threads", threads, "--threads-batch", threads]
            flags += ["--ctx-size", str(256 * options.clients), "--no-webui"]
            print("llama.cpp:", " ".join(flags), _version(options.llama_server), flush=True)
            print(_system([str(options.llama_server), "-m", str(file), "--port", "0", *flags, "-lv", "4"]), flush=True)
            servers_by_work["generate"].append(
                Server(
                    "llama.cpp",
                    lambda port: [str(options.llama_server), "-m", str(file), "--port", str(port), *flags],
                    "/v1/completions",
                    completion,
                    ("n_slots",),
                )
            )
    if "embed" in options.only:
        texts = texts_of("embed", [], options.texts)

        def vector(number: int) -> dict[str, Any]:
            return {"input": texts[number % len(texts)]}

        servers_by_work["embed"] = [
            Server("clearhead", clearhead_command(minilm()), "/v1/embeddings", vector, (", at http://",)),
            Server(
                "sentence-transformers",
                lambda port: [*peer, "embed", str(minilm()), str(port)],
                "/v1/embeddings",
                vector,
            ),
        ]
    if "translate" in options.only:
        model = marian(folder / "marian")
        lines = (model / "lines.txt").read_text("utf-8").splitlines()
        ours, theirs = in_8_bits(model, folder / "marian-int8"), for_ctranslate2(model, folder / "ct2", "int8")

        def sentence(number: int) -> dict[str, Any]:
            return {"inputs": " ".join(lines[number % len(lines)].split()[:12])}

        def ours_body(number: int) -> dict[str, Any]:
            # The length comes from the settings of the checkpoint.
            return {**sentence(number), "parameters": {"generate_parameters": {"num_beams": 1}}}

        servers_by_work["translate"] = [
            Server("clearhead", clearhead_command(ours), "/models/marian-int8", ours_body, (", at http://",)),
            Server(
                "CTranslate2",
                lambda port: [*peer, "translate", str(theirs), str(port), str(model / "source.spm"), str(TARGET)],
                "/models/marian",
                sentence,
                ("system", "CPU:", "Selected", "GEMM_S8"),
            ),
        ]
    return servers_by_work


def _version(program: Path) -> str:
    version = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    return (version.stdout + version.stderr).strip().replace("\n", "; ")


def _system(command: list[str]) -> str:
    """Return the line with the instructions that llama.cpp uses; only its verbose output has it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        line_of_system = next((line for line in process.stdout if "system_info" in line), "")
        process.kill()
    return line_of_system.strip()


def percentiles(values: list[float]) -> str:
    """Return the 50th and 95th percentile in milliseconds."""
    if len(values) < 2:
        return "-"
    quantiles = statistics.quantiles(values, n=20)
    return f"{1000 * quantiles[9]:.0f} / {1000 * quantiles[18]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, default=None, help="path of llama.cpp's server; default: none")
    parser.add_argument("--tokenizer", type=Path, default=Path("../shared/data/gpt2-tokenizer"))
    parser.add_argument("--texts", default="", help="file with one text per line, to embed")
    parser.add_argument("--only", nargs="+", default=["generate", "embed", "translate"])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--precision", default="auto", help="precision of clearhead; int8 models stay int8")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(describe(machine(options.threads)), flush=True)
    with tempfile.TemporaryDirectory() as name:
        for kind, sides in servers(options, Path(name)).items():
            rates: dict[tuple[str, str], list[float]] = {}
            seen: dict[tuple[str, str], Times] = {}
            for number in range(options.rounds):
                for side in sides if number % 2 == 0 else reversed(sides):
                    *pair, lines = measure_server(
                        side, options.clients, options.requests, 2 * number * options.requests
                    )
                    if number == 0:
                        print("\n".join([f"{side.name} says:", *lines]), flush=True)
                    for times, how in zip(pair, ("one by one", f"{options.clients} clients"), strict=True):
                        rates.setdefault((side.name, how), []).append(options.requests / times.seconds)
                        total = seen.setdefault((side.name, how), Times())
                        total.first += times.first
                        total.between += times.between
                        total.whole += times.whole
                        total.answers += times.answers[: 1 - len(total.answers)]
            print(
                f"\n{kind}: requests a second (median, spread); p50 / p95 ms of the answer, first token, between tokens"
            )
            for key, request_rates in rates.items():
                times = seen[key]
                print(f"{key[0]}, {key[1]}: {Spread.of(request_rates)}; ", end="")
                print("; ".join(percentiles(values) for values in (times.whole, times.first, times.between)))
            if kind == "embed":
                vectors = [seen[side.name, "one by one"].answers[0]["data"][0]["embedding"] for side in sides]
                cosine = np.dot(*vectors) / np.prod(np.linalg.norm(vectors, axis=1))
                print(f"cosine of the vectors of one text: {cosine:.4f}")
            many = f"{options.clients} clients"
            ours = rates["clearhead", many]
            print(f"clearhead, {many} : one by one: {Ratio.of(ours, rates['clearhead', 'one by one'])}")
            for side in sides[1:]:
                print(f"clearhead : {side.name}, {many}: {Ratio.of(ours, rates[side.name, many])}")


if __name__ == "__main__":
    main()
