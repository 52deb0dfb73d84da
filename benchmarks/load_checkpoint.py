"""Loading a checkpoint beside transformers: peak memory above the imported process, and seconds, of the same folder.

    python benchmarks/load_checkpoint.py
    python benchmarks/load_checkpoint.py --cases gpt2 --sides clearhead --rounds 1 --json

Each case is a folder of random weights of about 580 MB, made under --folder, or in a temporary one. Every measurement
is a process of its own, in which everything is imported before the clock starts; the two libraries take turns, with the
files in the page cache. Memory is the peak of resident memory, mapped files included, above what the process had before
loading: once for loading alone, once with a forward pass, which reads every weight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pairing import Ratio, Spread

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 7


@dataclass(frozen=True)
class Case:
    """One folder: the config, the type that its tensors are stored in, and in how many bytes a shard."""

    config: dict[str, Any]
    cls: str
    dtype: torch.dtype = torch.float32
    shard: int | None = None


_LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8192, "tie_word_embeddings": False,
}  # fmt: skip
CASES = {
    "llama": Case(_LLAMA, "LlamaForCausalLM"),
    # Its matrices are stored turned, and three of them as one.
    "gpt2": Case(
        {"model_type": "gpt2", "n_embd": 1024, "n_layer": 11, "n_head": 16, "vocab_size": 8192}, "GPT2LMHeadModel"
    ),
    "sharded": Case(_LLAMA, "LlamaForCausalLM", shard=100_000_000),
    "half": Case(_LLAMA, "LlamaForCausalLM", dtype=torch.bfloat16),
    # The rows of its queries and keys change places, so they are copied.
    "gptj": Case(
        {"model_type": "gptj", "n_embd": 1024, "n_layer": 10, "n_head": 16, "rotary_dim": 32, "vocab_size": 8192},
        "GPTJForCausalLM",
    ),
    # Its queries, keys and values stand together head by head.
    "gpt_neox": Case(
        {
            "model_type": "gpt_neox", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10,
            "num_attention_heads": 16, "vocab_size": 8192,
        },
        "GPTNeoXForCausalLM",
    ),
    # Its experts are tensors of their own in the file, one above the other here.
    "mixtral": Case(
        {
            "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 1408, "num_hidden_layers": 5,
            "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 5, "vocab_size": 8192,
        },
        "MixtralForCausalLM",
    ),
}  # fmt: skip


def make(case: Case, folder: Path) -> int:
    """Write a case; return how many bytes its weights take in memory as float32."""
    from clearhead.checkpoints.hf import registry
    from clearhead.checkpoints.hf.mapping import config as configs
    from clearhead.checkpoints.hf.saving import save_module
    from clearhead.core import build

    record = registry.find_family(case.config)
    model = record.spec_of(configs.parse(record, case.config).values, record.variants[0])
    module = build(model, device="meta").to(case.dtype).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.05, 0.05)
    save_module(module, folder, model_type=record.model_type, max_shard_size=case.shard or 2**40)
    return 4 * sum(parameter.numel() for parameter in module.parameters())


def resident(peak: bool = False) -> int:
    """Return the bytes of this process that are in memory, or the most that were since the last mark."""
    word = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(word))


def mark() -> int:
    """Begin to watch for a new peak, and return where it begins."""
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    return resident()


def measure(side: str, case: Case, folder: Path) -> dict[str, float]:
    """Load a folder in this process, and run it once."""
    ids = torch.arange(TOKENS)[None]
    if side == "clearhead":
        from clearhead.checkpoints.hf import registry
        from clearhead.checkpoints.hf.loading import load_module

        registry.all_families()
        before, start, used = mark(), time.perf_counter(), time.process_time()
        module: Any = load_module(folder).module
    else:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        kind = getattr(transformers, case.cls)
        before, start, used = mark(), time.perf_counter(), time.process_time()
        module = kind.from_pretrained(folder, dtype=torch.float32)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    loaded = resident(peak=True) - before
    with torch.no_grad():
        total = float(module(ids).logits.double().abs().sum())
    return {"seconds": seconds, "processor": used, "load": loaded, "run": resident(peak=True) - before, "sum": total}


def in_process(side: str, name: str, folder: Path) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", side, name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    measures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measures


def compare(name: str, sides: list[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Make a case and measure it in turns."""
    checkpoint = folder / name
    size = make(CASES[name], checkpoint)
    measures: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            measures[side].append(in_process(side, name, checkpoint))
    result: dict[str, Any] = {"case": name, "bytes": size}
    for side, measured in measures.items():
        result[side] = {
            key: statistics.median(measure_of_run[key] for measure_of_run in measured) for key in measured[0]
        }
        result[side] |= {f"{key}_ratio": result[side][key] / size for key in ("load", "run")}
        result[side]["all_seconds"] = [measure_of_run["seconds"] for measure_of_run in measured]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--sides", nargs="+", choices=["clearhead", "transformers"], default=["clearhead", "transformers"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="a folder for the checkpoints, which are removed again")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=3, metavar=("SIDE", "CASE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        side, name, folder = args.measure
        print(json.dumps(measure(side, CASES[name], Path(folder))))
        return
    for name in args.cases:
        with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
            results = compare(name, args.sides, args.rounds, Path(temporary))
        if args.json:
            print(json.dumps(results))
            continue
        for side in args.sides:
            medians = results[side]
            print(
                f"{name:9} {side:13} {results['bytes'] / 1e6:5.0f} MB  {Spread.of(medians['all_seconds'])} s  "
                f"{medians['processor']:5.2f} s of processors  "
                f"peak {medians['load_ratio']:.2f} x after loading, {medians['run_ratio']:.2f} x after a forward pass"
            )
        if len(args.sides) == 2:
            first, second = args.sides
            ratio = Ratio.of(results[second]["all_seconds"], results[first]["all_seconds"])
            print(f"{name:9} seconds {second} / {first}: {ratio}")


if __name__ == "__main__":
    main()
