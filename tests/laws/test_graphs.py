"""Each architecture compiles to one graph, forward and backward, except those listed with their graph breaks.

This runs in a subprocess: the import hook of the tests and `torch.compile` do not mix.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

MIXTURE = "an expert reads only the tokens that chose it, and their number is known at run time alone"
EXCEPTIONS = {"gpt_oss": (4, MIXTURE), "mixtral": (4, MIXTURE)}
"""Graph breaks of an architecture, and their reason."""


@pytest.mark.slow
def test_each_architecture_is_one_graph() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.laws.graphs_job"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    breaks: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert len(breaks) > 20
    expected = {name: count for name, (count, _) in EXCEPTIONS.items()}
    assert {name: count for name, count in breaks.items() if count} == expected
