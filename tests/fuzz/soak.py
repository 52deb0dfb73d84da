"""A server under random requests for minutes: no leak, no wrong answer, nothing lost.

    python -m tests.fuzz.soak --minutes 10
    python -m tests.fuzz.soak --seed 3

`clearhead serve` runs in a separate process, with a model of every family. Clients send requests to every path, with
and without streaming. Some disconnect at a random moment, read slowly or never, or send garbage. Each valid request was
answered once before, alone, and compared with the library. Every later answer must equal it to the last digit, for any
batch. At the end no request runs or waits, and threads, open files and memory have not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

import clearhead as ch
from clearhead.apps.serve.api.server import TICKS_BETWEEN
from tests.fuzz.requests import GET_PATHS, Case, draw_case, draw_request, fault_of, send, serving

CLIENTS, CASES = 16, 120
MOST_GROWTH = 24 * 2**20
"""The most growth of memory from the middle to the end, in bytes."""


class Soak:
    """The clients of a server, with their expected answers and the faults that they found.

    Args:
        port: the port of the server.
        seed: the seed of all random choices.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.address, self.seed = port, f"http://127.0.0.1:{port}", seed
        self.expected: list[tuple[Case, Any]] = []
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    async def prepare(self) -> None:
        """Send every valid request alone, and remember its answer."""
        draw = random.Random(self.seed)
        async with self._client() as client:
            for _ in range(CASES):
                case = draw_case(draw)
                answer = await client.post(case.path, json=case.body)
                # A request may be refused, such as for an address that a model lacks, but then every time.
                self.expected.append((case, _stable_answer(answer)))
        refused = sum(1 for _, reply in self.expected if reply[0] != 200)
        assert refused < CASES // 4, [(case, reply) for case, reply in self.expected if reply[0] != 200]

    def compare_with_library(self, folder: Path) -> int:
        """Compare completions and translations with those of the library, and return their number."""
        models = {name: ch.load(folder / name, device="cpu", precision="fp32") for name in ("lm", "mt")}
        count = 0
        for case, (status, reply) in self.expected:
            body = case.body
            if case.path == "/v1/completions" and status == 200 and not body.get("echo") and "stop" not in body:
                options = {"temperature": 0} if body["temperature"] == 0 else {
                    "temperature": 0.9, "seed": body["seed"], "num_return_sequences": body["n"], "top_p": 1.0,
                }  # fmt: skip
                generations = models["lm"].generate(body["prompt"], max_new_tokens=body["max_tokens"], **options)
                self._same(
                    case,
                    [choice["text"] for choice in reply["choices"]],
                    [generation.text for generation in generations],
                )
                count += 1
            elif case.path.startswith("/models/mt") and "parameters" not in body:
                texts = body["inputs"] if isinstance(body["inputs"], list) else [body["inputs"]]
                answers = reply if isinstance(reply, list) else [reply]
                self._same(
                    case,
                    [answer_record["translation_text"] for answer_record in answers],
                    models["mt"].translate(texts),
                )
                count += 1
        return count

    def _same(self, case: Case, actual: Any, expected: Any) -> None:
        if actual != expected:
            self.faults.append(f"wrong answer to {case}: {actual!r}, not {expected!r}"[:600])

    async def run(self, seconds: float) -> None:
        """Let all clients send requests until the time is over."""
        end = time.monotonic() + seconds
        await asyncio.gather(*[self._ask_until(end, random.Random(f"{self.seed} {n}")) for n in range(CLIENTS)])

    async def _ask_until(self, end: float, draw: random.Random) -> None:
        async with self._client() as client:
            while time.monotonic() < end and len(self.faults) < 20:
                kinds = [self._whole, self._whole, self._whole, self._stream, self._cut, self._slow, self._garbage]
                act = draw.choice(kinds)
                name = act.__name__.strip("_")
                try:
                    await act(client, draw)
                except Exception as error:  # noqa: BLE001 - every exception is a finding
                    self.faults.append(f"{name}: {error!r}"[:600])
                self.outcomes[name] += 1

    async def _whole(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        case, expected = draw.choice(self.expected)
        if draw.random() < 0.1:
            path = draw.choice(GET_PATHS)
            assert (await client.get(path)).status_code == (404 if path == "/nowhere" else 200), path
        answer = await client.post(case.path, json=case.body)
        while answer.status_code == 429:
            self.outcomes["(refused for a moment)"] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]) * draw.random())
            answer = await client.post(case.path, json=case.body)
        self._same(case, _stable_answer(answer), expected)

    def _generating(self, draw: random.Random) -> tuple[Case, Any]:
        some = [(case, reply) for case, reply in self.expected if case.path.endswith("completions") and reply[0] == 200]
        return draw.choice(some)

    async def _stream(self, client: httpx.AsyncClient, draw: random.Random, pause: float = 0.0) -> None:
        case, (_, reply) = self._generating(draw)
        texts = [""] * len(reply["choices"])
        async with client.stream("POST", case.path, json={**case.body, "stream": True}) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                    await asyncio.sleep(pause)
        whole = [
            choice_record["text"] if "text" in choice_record else choice_record["message"]["content"]
            for choice_record in reply["choices"]
        ]
        self._same(case, texts, whole)

    async def _slow(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        if draw.random() < 0.7:
            await self._stream(client, draw, pause=draw.choice([0.001, 0.05]))
            return
        # A client that never reads, or one that never ends its request.
        case, _ = self._generating(draw)
        content = case.encode(body=json.dumps({**case.body, "stream": True}).encode())
        content = content if draw.random() < 0.5 else content[: draw.randrange(1, len(content))]
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
        writer.write(content.replace(b":PORT", b":%d" % self.port))
        await asyncio.sleep(draw.choice([0.1, 1.0, 3.0]))
        writer.transport.abort()

    async def _cut(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        case, _ = draw.choice(self.expected)
        body = {**case.body, "stream": True} if case.path.endswith("completions") and draw.random() < 0.7 else case.body
        content = case.encode(body=json.dumps(body).encode()).replace(b":PORT", b":%d" % self.port)
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(content)
        await asyncio.sleep(draw.choice([0, 0.001, 0.01, 0.05, 0.3]) * draw.random())
        writer.transport.abort() if draw.random() < 0.5 else writer.close()

    async def _garbage(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        what, content = draw_request(draw)
        answer = await send(self.port, what, content)
        self.outcomes[f"(garbage {answer[9:12].decode('latin-1') or 'hung up'})"] += 1
        fault = fault_of(answer)
        if fault is not None:
            self.faults.append(f"{what}: {fault}"[:600])

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.address, timeout=120)


def _stable_answer(answer: httpx.Response) -> tuple[int, Any]:
    body = answer.json()
    for key in ("id", "created"):
        if isinstance(body, dict):
            body.pop(key, None)
    return answer.status_code, body


def _level(process: psutil.Process) -> dict[str, int]:
    return {
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "memory": process.memory_info().rss,
    }


async def soak_in_quarters(process: psutil.Process, soak: Soak, seconds: float) -> list[dict[str, int]]:
    """Let the clients send requests in four rounds; return the resource levels at the start and after each round."""
    levels = [_level(process)]
    for _ in range(4):
        await soak.run(seconds / 4)
        # The server returns freed memory to the system every ten seconds.
        await asyncio.sleep(TICKS_BETWEEN / 10 + 2)
        levels.append(_level(process))
        print(levels[-1], dict(soak.outcomes), f"{len(soak.faults)} findings", flush=True)
    return levels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        with serving(Path(name)) as server:
            soak = Soak(server.port, seed)
            asyncio.run(soak.prepare())
            compared = soak.compare_with_library(Path(name))
            levels = asyncio.run(soak_in_quarters(psutil.Process(server.process.pid), soak, 60 * arguments.minutes))
            soak.faults += _leftovers(httpx.get(f"{soak.address}/metrics").text, levels)
        soak.faults += server.faults
    for fault in dict.fromkeys(soak.faults):
        print(f"FINDING {fault}\n")
    num_requests = sum(count for name, count in soak.outcomes.items() if not name.startswith("("))
    print(f"{num_requests:,} requests, {compared} compared with the library, {len(soak.faults)} findings")
    return 1 if soak.faults else 0


def _leftovers(metrics: str, levels: list[dict[str, int]]) -> list[str]:
    """Return the requests, threads, files and memory that a server has kept after all clients left."""
    lines = [line for line in metrics.splitlines() if line.startswith(("clearhead_running", "clearhead_waiting"))]
    faults = [f"after the end: {line}" for line in lines if not line.endswith(" 0.0")]
    middle, end = levels[2], levels[4]
    if end["memory"] > middle["memory"] + MOST_GROWTH:
        faults.append(f"memory grows: {levels}")
    for name, slack in (("threads", 3), ("files", 8)):
        if end[name] > middle[name] + slack:
            faults.append(f"{name} grow: {levels}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
