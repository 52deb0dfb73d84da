"""Change one file of a tiny model after another, and use it: only `InputError` and `RunFailure` may come out.

The changed folder is used by the Python API or by a command line. A command line may end with 0, 1 or 2, must print the
reason, and may leave no half-written file. In the last fifth of the time, a server of tiny models gets requests changed
in the same way. After these it gets requests that schemathesis derives from its /openapi.json.

    python -m tests.fuzz --minutes 10
    python -m tests.fuzz --seed 3 --cases 500

Before, the kernels of linear layers in fp32, bf16, 8 and 4 bits are compared with their plain form.

It ends after the given time, but not before each file was changed once. It prints the seed, the number of cases by
outcome, and each finding with the case that reproduces it. The exit code is 1 if there is a finding, or if almost no
case succeeds, since then nothing was tested.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.cases import Findings, fuzz
from tests.fuzz.kernels import fuzz_kernels
from tests.fuzz.requests import fuzz_operations, fuzz_requests, serving

REQUESTS_SHARE = 0.2
"""The share of the time for requests to a server."""
KERNELS_SHARE = 0.1
"""The share of the time in which kernels are compared, without the time to compile them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, default=None, help="the number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    findings = Findings()
    if arguments.cases is None:
        compared, different = fuzz_kernels(seed, 60 * arguments.minutes * KERNELS_SHARE)
        print(f"{compared.total():7,}  products of kernels compared: {dict(compared)}")
        for fault in different:
            findings.faults[fault] = fault
            print(f"FINDING {fault}\n  repeat it with python -m tests.fuzz.kernels --seed {seed}\n")
    with tempfile.TemporaryDirectory() as folder:
        end = time.monotonic() + 60 * arguments.minutes * (1 - REQUESTS_SHARE - KERNELS_SHARE)
        for number in fuzz(Path(folder), seed, findings, first=arguments.first):
            done = number + 1 - arguments.first
            if done == arguments.cases or (time.monotonic() > end and done >= findings.files):
                break
    print(findings.report())
    if arguments.cases is None:
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
            seconds = 30 * arguments.minutes * REQUESTS_SHARE
            halves = [
                asyncio.run(fuzz_requests(server.port, seed, seconds)),
                fuzz_operations(server.port, seed, seconds=seconds),
            ]
        for counts, _ in halves:
            total, by_status = sum(counts.values()), [f"{n} {name}" for name, n in sorted(counts.items())]
            print(f"{total:7,}  requests: {', '.join(by_status)}")
        for fault in [*halves[0][1], *halves[1][1], *server.faults]:
            findings.faults[fault] = fault
            print(f"FINDING {fault}\n")
    return 1 if findings.faults or findings.outcomes["usable"] < sum(findings.outcomes.values()) // 12 else 0


if __name__ == "__main__":
    sys.exit(main())
