"""Kill trainings at random moments and inside writes, damage what they left, resume, and compare the ends bit by bit.

    python benchmarks/sigkill.py
    python benchmarks/sigkill.py --kinds translate lora --kills 20 --seed 7

Five kinds of runs on data made on the spot: a language model with an average of its weights, a translation model with
accumulation, averaged checkpoints and an early stop, a masked language model, a classifier, and a language model
trained further with LoRA. Each is trained once by the command line, undisturbed. Then a run is killed (SIGKILL) so many
times, every second time just before one of its writes, else at a random moment, and resumed, until it may end.
Afterwards the newest checkpoint of the undisturbed run is damaged in four ways (a flipped bit, a file that is cut off,
exchanged for that of an earlier checkpoint, or missing) and the run resumed: it must name the file and continue from
the checkpoint before. Every weight, every state of the optimizer, the averaged weights, the choice of the best
checkpoint, the manifests and the metrics must be those of the undisturbed run, bit by bit; times may differ. The exit
code is 1 where something does.

A killed process is forked from one that has imported the library, so that the time goes into training; the undisturbed
one is of its own, with another seed of Python's hashes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in "aeiou"]
MODEL = "[model]\nlayers = 1\nwidth = 16\nheads = 2\nfeedforward = 32\ndropout = 0.1\n"
TRAIN = (
    "[train]\nsteps = 160\nvalidate_every = 10\nbatch_tokens = 200\nkeep = 2\nseed = 3\n"
    'precision = "fp32"\nthreads = 1\n'
)
MORE = {
    "generate": "ema = 0.9\n",
    "translate": 'accumulate = 2\naverage = 3\nearly_stop = { metric = "bleu", patience = 5 }\n',
    "classify": "learning_rate = 1e-3\n",
}
WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
MOST_WRITES = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["generate", "translate", "fill", "classify", "lora"])
    parser.add_argument("--kills", type=int, default=20, help="of each run")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    multiprocessing.set_forkserver_preload(
        ["clearhead.apps.cli.main", "clearhead.training.assemble", "matplotlib.pyplot"]
    )
    faults = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        for kind in given.kinds:
            draw, begun = random.Random(f"{seed} {kind}"), time.monotonic()
            file, whole, killed = write_run_file(folder, kind), folder / kind / "whole", folder / kind / "killed"
            undisturbed(file, whole)
            kills = killed_run(file, killed, given.kills, draw)
            found = differences(whole, killed) + [fault for how in DAMAGES for fault in damaged(file, whole, how, draw)]
            seconds = time.monotonic() - begun
            print(
                f"{kind:10} {kills} kills and {len(DAMAGES)} damages in {seconds:.0f} s, {len(found)} differences",
                *found, sep="\n  ", flush=True,
            )  # fmt: skip
            faults += len(found) + (kills < given.kills)
    return 1 if faults else 0


def write_data(folder: Path) -> None:
    """Write texts that are reversed for the translation, with the first letter as a label."""
    draw = random.Random(1)
    for name, count in (("train", 600), ("valid", 30)):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(count)]
        (folder / f"{name}.source").write_text("".join(f"{line}\n" for line in lines))
        (folder / f"{name}.target").write_text("".join(f"{' '.join(reversed(line.split()))}\n" for line in lines))
        rows = [f"{line}\t{'early' if line < 'l' else 'late'}\n" for line in lines]
        (folder / f"{name}.tsv").write_text("".join(["text\tlabel\n", *rows]))


def write_run_file(folder: Path, kind: str) -> Path:
    """Write the run file of one kind."""
    task, init = ("generate", f'init = "{folder}/generate/whole"\n') if kind == "lora" else (kind, "")
    if kind == "lora" and not (folder / "generate" / "whole").exists():
        undisturbed(write_run_file(folder, "generate"), folder / "generate" / "whole")
    columns = {
        "translate": 'source = "{0}/{1}.source", target = "{0}/{1}.target"',
        "classify": 'text = "{0}/{1}.tsv", labels = "label"',
    }.get(task, 'text = "{0}/{1}.source", document = "line"')
    data = "".join(f"{name} = {{ {columns.format(folder, name)} }}\n" for name in ("train", "valid"))
    family = {"translate": "encoder-decoder", "generate": "decoder"}.get(task, "encoder")
    parts = [f'[task]\nkind = "{task}"\n{init}[data]\n{data}max_length = 32\n']
    if kind == "lora":
        parts.append("[lora]\nrank = 2\n")
    else:
        parts.append(f'[tokenizer]\nkind = "word"\n{MODEL}family = "{family}"\n')
    file = folder / f"{kind}.toml"
    file.write_text("".join([*parts, TRAIN, MORE.get(kind, "")]))
    return file


def undisturbed(file: Path, run: Path) -> None:
    """Train to the end by the command line."""
    command = [sys.executable, "-m", "clearhead", *arguments(file, run)]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONHASHSEED": "random"}, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr.decode()}")


def arguments(file: Path, run: Path) -> list[str]:
    """Return the arguments of a command that begins a run, or continues it."""
    resume = ["--resume"] if list((run / "checkpoints").glob("step-*")) else []
    return ["train", str(file), f"train.run={run}", *resume]


def train(file: Path, run: Path, *, seconds: float | None = None, writes: int | None = None) -> tuple[bool, str]:
    """Train in a process that may be killed; return whether it ended by itself, and its messages.

    Args:
        file: the run file.
        run: the run directory.
        seconds: until it is killed, from the first change of the folder on.
        writes: changes of the folder until it is killed, before the next one.
    """
    messages, began = run.with_name(f"{run.name}.messages"), run.with_name(f"{run.name}.began")
    began.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_train, args=(arguments(file, run), str(run), writes, str(messages), str(began)))
    process.start()
    if seconds is not None:
        while process.is_alive() and not began.exists():
            time.sleep(0.005)
        process.join(seconds)
        process.kill()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        sys.exit(f"{' '.join(arguments(file, run))}\n{messages.read_text()}")
    return process.exitcode == 0, messages.read_text()


def _train(words: list[str], run: str, writes: int | None, messages: str, began: str) -> None:
    """Run one command line in a process of its own."""
    from clearhead.apps.cli.main import main as command

    with open(messages, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.addaudithook(_killer(run, writes, began))
    sys.exit(command(words))


def _killer(run: str, writes: int | None, began: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Return a hook that counts the changes of a folder, and kills this process before one of them."""
    count = 0

    def hook(event: str, values: tuple[Any, ...]) -> None:
        nonlocal count
        is_write = event in WRITES or (event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if not is_write or isinstance(values[0], int) or not os.fsdecode(values[0]).startswith(run + os.sep):
            return
        if count == 0:
            os.close(os.open(began, os.O_CREAT | os.O_WRONLY))
        if count == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    return hook


def killed_run(file: Path, run: Path, kills: int, draw: random.Random) -> int:
    """Kill a training so many times, let it end, and return how often it was killed before it had ended.

    The time until a kill is drawn so that the kills fall on the whole of the run: twice as long where the last ones
    brought no checkpoint.
    """
    pause = 0.5
    for count in range(kills):
        before = _steps(run)
        is_write = count % 2 == 1
        ended, _ = train(
            file, run,
            seconds=None if is_write else draw.uniform(0, pause),
            writes=draw.randrange(MOST_WRITES) if is_write else None,
        )  # fmt: skip
        if ended:
            return count
        if not is_write:
            pause *= 0.7 if _steps(run) != before else 1.5
    train(file, run)
    return kills


def _steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def _flip(path: Path, earlier: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _cut_off(path: Path, earlier: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _exchange(path: Path, earlier: Path, draw: random.Random) -> None:
    shutil.copyfile(earlier, path)


def _remove(path: Path, earlier: Path, draw: random.Random) -> None:
    path.unlink()


DAMAGES = (_flip, _cut_off, _exchange, _remove)


def damaged(
    file: Path, whole: Path, damage: Callable[[Path, Path, random.Random], None], draw: random.Random
) -> list[str]:
    """Damage a file of a run's newest checkpoint, resume, and return what is wrong then."""
    run = whole.with_name("damaged")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    earlier, newest = (run / "checkpoints" / f"step-{step}" for step in _steps(run)[-2:])
    path = draw.choice(sorted(newest.iterdir()))
    damage(path, earlier / path.name, draw)
    _, messages = train(file, run)
    found = differences(whole, run)
    if not any(path.name in line and "damaged" in line for line in messages.splitlines()):
        found.append("is not named")
    return [f"{newest.name}/{path.name} after {damage.__name__[1:]}: {fault}" for fault in found]


def differences(whole: Path, killed: Path) -> list[str]:
    """Return what differs between two run directories, but for times."""
    names = sorted({path.relative_to(run).as_posix() for run in (whole, killed) for path in run.rglob("*")})
    found = []
    for name in names:
        first, second = (run / name for run in (whole, killed))
        # A run file names its run, and plots show times.
        if name.startswith("plots/") or name == "run.toml":
            continue
        if first.exists() != second.exists():
            found.append(f"{name} is in one of them only")
        elif first.is_file() and content(first) != content(second):
            found.append(f"{name} differs")
    return found


def content(path: Path) -> Any:
    """Return the content of a file, without times and the digests of files that have them."""
    if path.name == "metrics.jsonl":
        return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name == "manifest.json":
        return {name: entry for name, entry in json.loads(path.read_text())["files"].items() if name != "state.json"}
    return _timeless(json.loads(path.read_text())) if path.name == "state.json" else path.read_bytes()


def _timeless(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {key: _timeless(value) for key, value in content.items() if "second" not in key and key != "environment"}


if __name__ == "__main__":
    sys.exit(main())
