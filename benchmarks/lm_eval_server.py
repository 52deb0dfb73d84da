"""`lm_eval` through `clearhead serve`, compared with its Hugging Face backend, on three local tasks.

pip install 'lm_eval[api]' transformers
python benchmarks/lm_eval_server.py shared/data/stories260K

The tasks are multiple choice by log-likelihood, perplexity of whole texts, and generation until a stop text. Printed
are both results of each task, and the number of equal answers: choices and texts exactly, log-likelihoods up to
rounding. The exit code is 1 if some answers differ.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("Lily", "Tom", "Max", "Anna", "Ben", "Sue")
THINGS = ("ball", "tree", "cat", "cake", "boat", "bird", "dog", "hat")
TASKS = {
    "local_choice": """task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: "FOLDER/choice.jsonl"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: "{{ends}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "local_rolling": """task: local_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: "FOLDER/rolling.jsonl"}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "local_until": """task: local_until
dataset_path: json
dataset_kwargs: {data_files: {test: "FOLDER/until.jsonl"}}
test_split: test
output_type: generate_until
generation_kwargs: {until: ["."], max_gen_toks: 48, do_sample: false}
doc_to_text: "{{start}}"
doc_to_target: "{{end}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def write_tasks(folder: Path, count: int) -> None:
    """Write the data and the configuration files of the tasks."""
    draw = random.Random(1)
    rows: dict[str, list[dict[str, Any]]] = {"choice": [], "rolling": [], "until": []}
    for _ in range(count):
        name, noun, other = draw.choice(NAMES), *draw.sample(THINGS, 2)
        start = f"Once upon a time, there was a child named {name}. {name} had a big {noun}. {name} loved the"
        ends = [f" {noun}", f" {other}", " under", " because of"]
        rows["choice"].append({"start": start, "ends": ends, "right": 0})
        rows["rolling"].append({"text": f"{start} {noun} and played with the {other} in the park. They were happy."})
        rows["until"].append({"start": f"{start} {noun}. One day, {name}", "end": "saw"})
    for kind, some in rows.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)), encoding="utf-8")


def evaluate(model: str, arguments: str, folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the results of the tasks, and the answers of each task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=list(TASKS), task_manager=TaskManager(include_path=str(folder)),
        log_samples=True, bootstrap_iters=0,
    )  # fmt: skip
    assert results is not None
    answers = {
        name: [sample["resps"] for sample in sorted(results["samples"][name], key=lambda record: record["doc_id"])]
        for name in TASKS
    }
    return results["results"], answers


def agreement(first: Any, other: Any) -> bool:
    """Return whether two answers are equal, with numbers compared up to rounding."""
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(agreement, first, other))
    try:
        return abs(float(first) - float(other)) <= 1e-3 + 1e-5 * abs(float(first))
    except (TypeError, ValueError):
        # The tokenizer drops the blank before the first decoded word.
        return str(first).strip() == str(other).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a decoder in the layout of Hugging Face")
    parser.add_argument("--count", type=int, default=40, help="number of examples per task")
    parser.add_argument("--concurrent", type=int, default=8, help="number of concurrent requests")
    options = parser.parse_args()
    # No network is needed.
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    model = options.model.resolve()
    words = [sys.executable, "-m", "clearhead", "serve", str(model), "--port", "0", "--precision", "fp32"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, options.count)
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = "http://" + server.stdout.readline().rpartition("http://")[2].strip()
            begun = time.perf_counter()
            ours = evaluate(
                "local-completions",
                f"model={model.name},base_url={address}/completions,tokenizer_backend=huggingface,tokenizer={model},"
                f"num_concurrent={options.concurrent},max_length=512,add_bos_token=True",
                folder,
            )
            middle = time.perf_counter()
            theirs = evaluate(
                "hf", f"pretrained={model},dtype=float32,device=cpu,max_length=511,add_bos_token=True", folder
            )
            end = time.perf_counter()
        finally:
            server.terminate()
            server.wait(60)
    versions = ", ".join(
        f"{package} {importlib.metadata.version(package)}" for package in ("lm_eval", "transformers", "torch")
    )
    print(f"{versions}; clearhead serve {middle - begun:.1f} s, Hugging Face {end - middle:.1f} s")
    is_equal = True
    for task in TASKS:
        pairs = list(zip(ours[1][task], theirs[1][task], strict=True))
        same = sum(agreement(*pair) for pair in pairs)
        is_equal &= same == len(pairs)
        for metric, value in theirs[0][task].items():
            if isinstance(value, float) and "stderr" not in metric:
                print(f"{task} {metric.partition(',')[0]}: {ours[0][task][metric]:.6f}, Hugging Face {value:.6f}")
        print(f"{task}: {same} of {len(pairs)} answers agree")
        for pair in [pair for pair in pairs if not agreement(*pair)][:3]:
            print(f"  {pair[0]!r}, Hugging Face {pair[1]!r}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
