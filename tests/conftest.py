"""Setup of all tests: types and shapes are checked in the whole package; one thread, no network, a private cache."""

from __future__ import annotations

import os
import sysconfig

# Set before torch, tokenizers and matplotlib are imported; subprocesses that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The commands of messages then begin with "clearhead", as in an activated environment.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])

from tests import typechecker

typechecker.install("clearhead")

import gc
import random
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}
HARDWARE = "needs a GPU", "this processor has no"
"""Texts of the reasons for which a test may be skipped in CI, since they depend on hardware."""


def data_root() -> Path:
    """The folder of development data: CLEARHEAD_DATA, by default ../shared/data next to the repository."""
    folder = Path(os.environ.get("CLEARHEAD_DATA", "../shared/data"))
    return folder if folder.is_absolute() else (ROOT / folder).resolve()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The development data, or a skip with the reason (in CI a failure)."""
    folder = data_root()
    if not folder.is_dir():
        pytest.skip(f"no development data at {folder}: set CLEARHEAD_DATA")
    return folder


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the system's browser, or a skip with the reason (in CI a failure)."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine: install the package chromium")
    return browser


@pytest.fixture(scope="session")
def screenshots(pytestconfig: pytest.Config) -> Path:
    """The folder for pictures of pages at all sizes, to look at after a change: .pytest_cache/d/screenshots."""
    return pytestconfig.cache.mkdir("screenshots")


@pytest.fixture(scope="session", autouse=True)
def cache_root(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """The library's cache in a temporary folder, so that no test sees what an earlier run left.

    Compiled kernels are shared between workers and runs: compiling takes minutes, and their names depend on all inputs.
    """
    folder = tmp_path_factory.mktemp("clearhead-cache")
    (folder / "native").symlink_to(pytestconfig.cache.mkdir("kernels"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARHEAD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: two workers share two cores, and the order of sums stays the same."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    """Fail a test that leaves another number of threads: the sums of later tests would have other bits."""
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before, f"this test leaves torch with {after} threads instead of {before}: use preserve_threads()"


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Seed all generators, so that each test has the same random numbers in any order."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def quick_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train without plots and without measurements before the first step."""
    from tests.training.quick import leave_out

    leave_out(monkeypatch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first, so that no worker starts one at the end."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Exclude the millions of existing objects (modules and tests) from garbage collection."""
    gc.collect()
    gc.freeze()


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not (IN_CI and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(words in reason for words in HARDWARE):
        report.outcome = "failed"
        report.longrepr = f"{reason}\nIn CI a skip is a failure: .ci/run must bring what this test needs."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped test in CI."""
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a skipped module in CI."""
    report = yield
    _refuse_skip(report)
    return report
