"""How processes meet: variables of the environment, random words, reported faults, and restarts of one job."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from clearhead.base.errors import InputError, RunFailure
from clearhead.training import assemble
from clearhead.training.parallel import meeting
from clearhead.training.parallel.meeting import Meeting
from clearhead.training.parallel.processes import join_processes
from clearhead.training.parallel.world import Process
from clearhead.training.runfile.read import load_run_file
from tests.training.parallel.group_job import free_ports
from tests.training.parallel.groups import TEXT, write_data, write_run_file
from tests.training.quick import leave_out
from tests.training.small import Recorder

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
             "TORCHELASTIC_USE_AGENT_STORE", "SLURM_NTASKS", "SLURM_NNODES")  # fmt: skip
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets these variables and no others of torchrun and Slurm."""

    def change(**values: str) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return change


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "1"}, ["RANK is 1, but WORLD_SIZE is not set"]),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEETING}, ["RANK is 2, but WORLD_SIZE is 2"]),
        ({"WORLD_SIZE": "2", **MEETING}, ["WORLD_SIZE is 2, but RANK is not set"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is 0"]),
        ({"RANK": "one", "WORLD_SIZE": "-2"}, ["RANK is 'one'", "WORLD_SIZE is '-2'", "whole number"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR is not set", "MASTER_PORT is not set"]),
        ({"RANK": "0", "WORLD_SIZE": "2", **MEETING, "MASTER_PORT": "70000"}, ["MASTER_PORT is 70000", "65535"]),
        ({"SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, ["SLURM_NTASKS is 4", "--nnodes=2 --nproc-per-node=2", "srun"]),
    ],
)
def test_wrong_variables_are_refused_in_one_line_with_their_values(
    environment: Callable[..., None], variables: dict[str, str], expected: list[str]
) -> None:
    environment(**variables)
    with pytest.raises(InputError) as refusal:
        Process.here()
    line = str(refusal.value)
    assert "\n" not in line and "torchrun" in line
    assert all(words in line for words in expected), line


def test_variables_of_torchrun_and_of_one_slurm_task_are_read(environment: Callable[..., None]) -> None:
    environment(SLURM_NTASKS="1")
    assert Process.here() == Process()
    environment(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", **MEETING, SLURM_NTASKS="2")
    assert Process.here() == Process(3, 4, 1, 2, machine=1, address="127.0.0.1", port=29511)


class Agent:
    """The store of one torchrun job, and the meetings of its two processes, which this one plays."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.store = dist.TCPStore("127.0.0.1", next(free_ports()), is_master=True, wait_for_workers=False)

    def meetings(self, seconds: float = 60.0) -> list[Meeting]:
        """Return new meetings, as of processes that torchrun has just started; each on a machine of its own."""
        meetings = []
        for rank in range(2):
            meeting._trainings = itertools.count()
            process = Process(rank, 2, 0, 1, rank, "127.0.0.1", self.store.port, has_agent=True)
            meetings.append(Meeting(process, self.messages.append, seconds))
        return meetings


def test_an_attempt_begins_with_a_word_of_its_own_though_an_earlier_one_left_its_word() -> None:
    agent, words = Agent(), set()
    agent.store.set("word", "of a process that was killed while it waited")
    for _ in range(3):
        first, second = agent.meetings()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(second.arrive)
            (store, word), (other, same) = first.arrive(), future.result(timeout=60)
        store.set("from", word)
        assert word == same and other.get("from").decode() == word and first.job == second.job
        assert first.is_first_to_fail() and not second.is_first_to_fail()
        words.add(word)
    assert len(words) == 3


def test_wrong_input_of_one_process_ends_the_waiting_ones_and_later_attempts() -> None:
    agent = Agent()
    first, second = agent.meetings()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.arrive)
        assert second.report_early(InputError("own.py is missing")), "the first to find it tells the user"
        with pytest.raises(InputError, match=r"own\.py is missing") as reached:
            waiting.result(timeout=60)
    assert not first.report(reached.value), "it was said"
    for member in agent.meetings():
        with pytest.raises(InputError, match=r"own\.py is missing") as again:
            member.arrive()
        assert member.report(again.value), "the last line of each machine is the fault"


def test_a_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "NOTICE_SECONDS", 0.1)
    agent = Agent()
    for member, other in zip(agent.meetings(0.5), (1, 0), strict=True):
        if other == 0:  # a new job, in which nobody is there
            agent.store.delete_key("word")
        with pytest.raises(RunFailure, match=f"for process {other} of 2"):
            member.arrive()
        assert agent.messages.pop().startswith(f"process {1 - other} waits for process {other} of 2 at 127.0.0.1:")
        assert not agent.messages


def test_a_step_waits_as_long_as_the_run_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, seen = Agent(), {}

    def note(backend: str, **named: object) -> None:
        seen.update(named)
        raise RunFailure("enough")

    monkeypatch.setattr(dist, "init_process_group", note)
    second = agent.meetings()[1]
    with ThreadPoolExecutor(1) as pool, pytest.raises(RunFailure, match="enough"):
        future = pool.submit(second.arrive)
        first = Process(0, 2, 0, 1, 0, "127.0.0.1", agent.store.port, has_agent=True)
        with join_processes(first, tmp_path, device="cpu", timeout=17.0, notify=print):
            pass
    future.result(timeout=60)
    assert seen["timeout"] == timedelta(seconds=17)


def test_a_port_of_another_program_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"MASTER_PORT is {port}, and another program uses 127.0.0.1:{port}"):
            Meeting(Process(0, 2, address="127.0.0.1", port=port), lambda _: None)


class Killed(Recorder):
    """Ends a training in its third step, as a signal would."""

    def step(self, report: object) -> None:
        """Fail after three steps."""
        super().step(report)  # type: ignore[arg-type]
        if len(self.steps) == 3:
            raise KeyboardInterrupt


def test_a_restart_continues_what_its_own_job_began_and_nothing_else(
    tmp_path: Path, environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(monkeypatch)
    write_data(tmp_path)
    file = write_run_file(tmp_path, "g", 'kind = "generate"', "decoder", TEXT.replace("PART", f"{tmp_path}/PART"))

    def attempt(agent: Agent, shown: Recorder) -> Recorder:
        meeting._trainings = itertools.count()
        environment(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{agent.store.port}",
                    TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip
        assemble.train_run(load_run_file(file, ["train.save_every=1"]), resume=False, progress=shown)
        return shown

    job, another = Agent(), Agent()
    with pytest.raises(KeyboardInterrupt):
        attempt(job, Killed())
    for _ in range(2):
        with pytest.raises(InputError, match="already holds a run that reached step 2: add --resume"):
            attempt(another, Recorder())
    assert len(attempt(job, Recorder()).steps) == 2
