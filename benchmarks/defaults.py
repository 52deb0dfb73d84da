"""Quality of default run files: `new`, `train` and `evaluate` for every task, compared with plain baselines.

    python benchmarks/defaults.py --data ../shared/data [--task T] [--size 5000|all|demo] [--seed S] [--minutes 5]

Each cell of the table is a JSON file in benchmarks/results/defaults. A cell with a file is skipped, unless --again is
given. The table is printed at the end. On a busy machine, --steps N sets the number of steps. The option --steps-of
FOLDER takes steps and model from the same cells in FOLDER, which an idle machine has written. On the idle machine,
--recipes FOLDER only runs `new`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from baselines import (
    commonest_tags,
    commonest_token,
    naive_bayes,
    nearest_sentence,
    nearest_words,
    ngram_bits,
    translation_recall,
    word_by_word,
)
from sacrebleu import corpus_bleu

from clearhead.tasks.answer.use import answer_scores
from clearhead.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results" / "defaults"
EXAMPLES = Path(__file__).parent.parent / "examples"
NUM_TAGGED = 99_000
MODEL_KEYS = ("layers", "width", "heads", "feedforward", "dropout")


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        task: the kind of task.
        size: the amount of data: "5000", "all", or "demo" for the data of the demos.
        data: the name of the data.
        score: the key of the score in `evaluate --json`, and its name.
        aim: the target on test data. None means twice the baseline.
    """

    task: str
    size: str
    data: str
    score: tuple[str, str]
    aim: float | None = None

    @property
    def name(self) -> str:
        return f"{self.task}-{self.size}"


BLEU, RECALL, BITS = ("bleu", "BLEU"), ("recall_at_1", "recall@1"), ("bits_per_byte", "bits per character")
ACCURACY, TAGS, F1 = ("accuracy", "accuracy"), ("tag_accuracy", "accuracy of tags"), ("f1", "F1")
CELLS = (
    Cell("translate", "5000", "Multi30k De-En", BLEU, 31.0),
    Cell("translate", "all", "Multi30k De-En", BLEU),
    Cell("embed", "5000", "Multi30k De-En", RECALL, 74.0),
    Cell("embed", "all", "Multi30k De-En", RECALL),
    Cell("generate", "all", "Shakespeare", BITS, 2.13),
    Cell("classify", "5000", "SST-2", ACCURACY, 80.0),
    Cell("classify", "all", "SST-2", ACCURACY),
    Cell("tag", "5000", "Python's library, 99k tokens", TAGS, 88.0),
    Cell("tag", "all", "Python's library", TAGS),
    Cell("answer", "5000", "Python's library", F1),
    Cell("answer", "all", "Python's library", F1),
    Cell("fill", "5000", "Multi30k English", ACCURACY),
    Cell("fill", "all", "Multi30k English", ACCURACY),
    Cell("denoise", "5000", "Multi30k English", ACCURACY),
    Cell("denoise", "all", "Multi30k English", ACCURACY),
    Cell("translate", "demo", "dates", BLEU),
    Cell("classify", "demo", "names", ACCURACY),
    Cell("generate", "demo", "Python's library", BITS),
    Cell("fill", "demo", "Python's library", ACCURACY),
)


@dataclass(frozen=True)
class Parts:
    """The data of a cell.

    Attributes:
        new: the options of `clearhead new`.
        evaluate: the options of `clearhead evaluate`.
        baselines: functions of the run directory that return a baseline score on the test data, by name.
    """

    new: list[str]
    evaluate: list[str]
    baselines: dict[str, Callable[[Path], float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task")
    parser.add_argument("--size", choices=("5000", "all", "demo"))
    parser.add_argument("--seed", type=int, help="default: 1, then 2")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--steps-of", type=Path, metavar="FOLDER")
    parser.add_argument("--recipes", type=Path, metavar="FOLDER")
    parser.add_argument("--work", type=Path, default=Path("runs/defaults"), help="folder for data and runs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    for seed in (1, 2) if options.seed is None else (options.seed,):
        for cell in CELLS:
            if options.task in (None, cell.task) and options.size in (None, cell.size):
                file = (options.recipes or RESULTS) / f"{cell.name}-{seed}.json"
                if options.again or not file.exists():
                    record = (recipe if options.recipes else run)(cell, seed, options)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if not options.recipes:
        print(table())


def prepare(cell: Cell, seed: int, options: argparse.Namespace) -> tuple[Parts, Path, Path]:
    """Write the data of a cell, and return it with the paths of its run file and of its run."""
    folder = options.work / f"{cell.name}-{seed}"
    if folder.exists():
        sys.exit(f"{folder} exists already: remove it")
    folder.mkdir(parents=True)
    parts = PARTS[cell.task if cell.size != "demo" else f"{cell.task}-demo"](cell, options.data, folder)
    return parts, folder / "run.toml", folder / "run"


def new_run_file(
    cell: Cell, parts: Parts, run_file: Path, run_folder: Path, minutes: float
) -> tuple[dict[str, Any], float]:
    """Write the run file of a cell."""
    shown = ["-o", str(run_file), "--run", str(run_folder), "--json"]
    return command("new", cell.task, *parts.new, "--minutes", str(minutes), *shown)


def recipe(cell: Cell, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the model and the number of steps that `new` chooses for a cell on this machine."""
    parts, run_file, run_folder = prepare(cell, seed, options)
    _, seconds = new_run_file(cell, parts, run_file, run_folder, options.minutes)
    steps = tomllib.loads(run_file.read_text(encoding="utf-8"))["train"]["steps"]
    return {"steps": steps, "model": model_of(run_file), "seconds": {"new": seconds}}


def run(cell: Cell, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one cell, and return its record."""
    parts, run_file, run_folder = prepare(cell, seed, options)
    threads = ["--threads", str(options.threads)]
    new, new_seconds = new_run_file(cell, parts, run_file, run_folder, options.minutes)
    changes = [f"train.seed={seed}", *steps_to_take(cell, seed, options)]
    trained, train_seconds = command("train", str(run_file), *changes, *threads, "--json")
    scores, evaluate_seconds = command("evaluate", str(run_folder), *parts.evaluate, *threads, "--json")
    baselines = {name: round(baseline(run_folder), 3) for name, baseline in parts.baselines.items()}
    factor = 1 if cell.score in (BLEU, BITS) else 100
    return {
        "task": cell.task,
        "size": cell.size,
        "data": cell.data,
        "seed": seed,
        "score": cell.score[1],
        "test": round(factor * scores[cell.score[0]], 3),
        "validation": validation(run_folder),
        "baselines": baselines,
        "aim": cell.aim,
        "minutes": options.minutes,
        "steps": trained["step"],
        "best": trained["best"],
        "model": model_of(run_folder / "run.toml"),
        "new": {key: value for key, value in new.items() if key not in ("file", "run")},
        "seconds": {"new": new_seconds, "train": train_seconds, "evaluate": evaluate_seconds},
        "changes": changes,
        "machine": f"{processor()}, {options.threads} threads",
        "torch": torch.__version__,
    }


def command(*words: str) -> tuple[dict[str, Any], float]:
    """Run a command of clearhead, and return its JSON and the seconds that it took."""
    print("clearhead", *words, file=sys.stderr, flush=True)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "clearhead", *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), round(time.perf_counter() - began, 1)


def steps_to_take(cell: Cell, seed: int, options: argparse.Namespace) -> list[str]:
    """Return the overrides of the run file for --steps and --steps-of."""
    if options.steps_of is not None:
        result_files = sorted(
            options.steps_of.glob(f"{cell.name}-*.json"), key=lambda file: not file.match(f"*-{seed}.json")
        )
        if not result_files:
            sys.exit(f"{options.steps_of} has no result of {cell.name}: run the cell there first")
        record = json.loads(result_files[0].read_text(encoding="utf-8"))
        model = [f"model.{key}={value}" for key, value in record["model"].items()]
        return [f"train.steps={record['steps']}", "train.validate_every=0.1", *model]
    return [f"train.steps={options.steps}", "train.validate_every=0.1"] if options.steps is not None else []


def model_of(run_file: Path) -> dict[str, Any]:
    table = tomllib.loads(run_file.read_text(encoding="utf-8"))["model"]
    return {key: table[key] for key in MODEL_KEYS}


def validation(run_folder: Path) -> dict[str, float]:
    """Return the best loss and score of the validations."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["valid_loss"] for row in rows if row.get("valid_loss") is not None]
    scores = [row["valid_score"] for row in rows if row.get("valid_score") is not None]
    return {"loss": round(min(losses), 4), **({"score": round(max(scores), 3)} if scores else {})}


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table() -> str:
    """Return the table of all cells with a result, with both seeds in one row."""
    lines = ["| task, data | size | score | test, by seed | aim | baselines | steps | minutes of training |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for cell in CELLS:
        records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob(f"{cell.name}-?.json"))]
        if records:
            plain = ", ".join(f"{name} {value:g}" for name, value in records[0]["baselines"].items())
            lines.append(
                f"| {cell.task}, {cell.data} | {cell.size} | {cell.score[1]} | "
                f"{', '.join(format(record['test'], 'g') for record in records)} | "
                f"{'-' if cell.aim is None else cell.aim} | "
                f"{plain} | {', '.join(str(record['steps']) for record in records)} | "
                f"{', '.join(format(record['seconds']['train'] / 60, '.1f') for record in records)} |"
            )
    return "\n".join(lines)


# --- data ---


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def write(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def most(cell: Cell) -> int | None:
    return 5_000 if cell.size == "5000" else None


def multi30k(cell: Cell, data: Path, folder: Path) -> tuple[Parts, list[tuple[str, str]], list[tuple[str, str]]]:
    """Write sentence pairs, and return their options, the training pairs and the test pairs."""
    source = data / "multi30k"
    names = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    sides = {split: [read(source / f"{name}.{side}") for side in ("de", "en")] for split, name in names.items()}
    sides["train"] = [lines[: most(cell)] for lines in sides["train"]]
    return pair_parts(sides, folder)


def pair_parts(
    sides: dict[str, list[list[str]]], folder: Path
) -> tuple[Parts, list[tuple[str, str]], list[tuple[str, str]]]:
    files = {
        split: [write(folder / f"{split}.{end}", lines) for end, lines in zip(("de", "en"), both, strict=True)]
        for split, both in sides.items()
    }
    new = ["--source", files["train"][0], "--target", files["train"][1]]
    new += ["--valid-source", files["valid"][0], "--valid-target", files["valid"][1]]
    pairs = [list(zip(*sides[split], strict=True)) for split in ("train", "test")]
    return Parts(new, ["--source", files["test"][0], "--target", files["test"][1]], {}), pairs[0], pairs[1]


def translation_baselines(
    train: list[tuple[str, str]], test: list[tuple[str, str]]
) -> dict[str, Callable[[Path], float]]:
    sources, targets = ([pair[side] for pair in test] for side in (0, 1))
    return {
        "word by word": lambda run_folder: corpus_bleu(word_by_word(train, sources), [targets]).score,
        "nearest sentence": lambda run_folder: corpus_bleu(nearest_sentence(train, sources), [targets]).score,
    }


def translate(cell: Cell, data: Path, folder: Path) -> Parts:
    parts, train, test = multi30k(cell, data, folder)
    return Parts(parts.new, parts.evaluate, translation_baselines(train, test))


def embed(cell: Cell, data: Path, folder: Path) -> Parts:
    parts, train, test = multi30k(cell, data, folder)
    sources, targets = ([pair[side] for pair in test] for side in (0, 1))
    return Parts(
        parts.new,
        parts.evaluate,
        {"translated TF-IDF": lambda run_folder: translation_recall(train, sources, targets)},
    )


def generate(cell: Cell, data: Path, folder: Path) -> Parts:
    """Write texts; the last tenth is the test set, and the n-gram baseline may read all of the rest."""
    text = (data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    assert text.isascii(), "a byte is a character"
    end = len(text) * 9 // 10
    cuts = {"train": text[:end], "test": text[end:]}
    return running(cuts, folder, {"5-gram": lambda run_folder: ngram_bits(text[:end], cuts["test"])})


def running(cuts: dict[str, str], folder: Path, baselines: dict[str, Callable[[Path], float]]) -> Parts:
    files = {split: folder / f"{split}.txt" for split in cuts}
    for split, cut in cuts.items():
        files[split].write_text(cut, encoding="utf-8")
    new = ["--text", str(files["train"])]
    new += ["--valid-text", str(files["valid"])] if "valid" in files else []
    return Parts(new, ["--text", str(files["test"])], baselines)


def captions(cell: Cell, data: Path, folder: Path) -> Parts:
    source = data / "multi30k"
    sides = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    lines = {split: read(source / f"{name}.en") for split, name in sides.items()}
    lines["train"] = lines["train"][: most(cell)]
    cuts = {split: "".join(f"{line}\n" for line in split_lines) for split, split_lines in lines.items()}
    parts = running(cuts, folder, {"commonest token": lambda run_folder: guess(run_folder, lines)})
    line = ["--document", "line"]
    return Parts([*parts.new, *line], [*parts.evaluate, *line], parts.baselines)


def guess(run_folder: Path, lines: dict[str, list[str]]) -> float:
    tokenizer = Tokenizer.load(run_folder / "tokenizer.json")
    return commonest_token(tokenizer.encode_batch(lines["train"]), tokenizer.encode_batch(lines["test"]))


def classify(cell: Cell, data: Path, folder: Path) -> Parts:
    names = {"train": "train", "valid": "dev", "test": "test"}
    rows = {
        split: [(line[2:], line[0]) for line in read(data / "sst2" / f"{name}.txt")] for split, name in names.items()
    }
    rows["train"] = rows["train"][: most(cell)]
    return write_labelled(rows, folder)


def write_labelled(rows: dict[str, list[tuple[str, str]]], folder: Path) -> Parts:
    files = {
        split: write(folder / f"{split}.tsv", ["text\tlabel", *(f"{text}\t{label}" for text, label in split_rows)])
        for split, split_rows in rows.items()
    }
    new = ["--text", files["train"], "--labels", "label", "--valid-text", files["valid"]]
    score = {"naive Bayes": lambda run_folder: naive_bayes(rows["train"], rows["test"])}
    return Parts(new, ["--text", files["test"], "--labels", "label"], score)


def tag(cell: Cell, data: Path, folder: Path) -> Parts:
    """Write tagged sentences of the whole library, drawn at random up to a number of tokens."""
    subprocess.run([sys.executable, str(EXAMPLES / "make_tags.py"), str(folder)], check=True, stdout=sys.stderr)
    files = {split: folder / f"{split}.conll" for split in ("train", "valid", "test")}

    def sentences(split: str) -> list[list[tuple[str, str]]]:
        parts = files[split].read_text(encoding="utf-8").split("\n\n")
        rows = ([line.split("\t") for line in block.split("\n")] for block in parts if block)
        return [[(row[0], row[1]) for row in sentence] for sentence in rows]

    if cell.size == "5000":
        drawn, sentences_left, count = sentences("train"), [], 0
        random.Random(1).shuffle(drawn)
        for sentence in drawn:
            if count + len(sentence) <= NUM_TAGGED:
                sentences_left.append(sentence)
                count += len(sentence)
        write(files["train"], ["".join(f"{word}\t{tag}\n" for word, tag in sentence) for sentence in sentences_left])
    return Parts(
        ["--text", str(files["train"]), "--valid-text", str(files["valid"])],
        ["--text", str(files["test"])],
        {"commonest tag": lambda run_folder: commonest_tags(sentences("train"), sentences("test"))},
    )


def answer(cell: Cell, data: Path, folder: Path) -> Parts:
    """Write random questions about functions of the library; they set the length of the baseline's answers."""
    subprocess.run([sys.executable, str(EXAMPLES / "make_questions.py"), str(folder)], check=True, stdout=sys.stderr)
    files = {split: folder / f"{split}.jsonl" for split in ("train", "valid", "test")}
    lines = read(files["train"])
    write(files["train"], random.Random(1).sample(lines, most(cell) or len(lines)))

    def score(split: str, length: int) -> float:
        questions = [json.loads(line) for line in read(files[split])][:1_500]
        answers = nearest_words([(question["context"], question["question"]) for question in questions], length)
        return 100 * answer_scores(answers, [[question["answer"]] for question in questions]).f1

    def nearest(run_folder: Path) -> float:
        return score("test", max(range(1, 9), key=lambda length: score("train", length)))

    new = ["--text", str(files["train"]), "--valid-text", str(files["valid"])]
    return Parts(new, ["--text", str(files["test"])], {"nearest words": nearest})


# --- the data of the demos ---


def dates(cell: Cell, data: Path, folder: Path) -> Parts:
    from clearhead.apps.demo.translate import make_date_sets

    sets = make_date_sets(seed=1, train_size=100_000, valid_per_locale=20, test_per_locale=20)
    sides = {
        split: [[pair[side] for pair in getattr(sets, split)] for side in (0, 1)]
        for split in ("train", "valid", "test")
    }
    parts, train, test = pair_parts(sides, folder)
    return Parts(parts.new, parts.evaluate, translation_baselines(train, test))


def names(cell: Cell, data: Path, folder: Path) -> Parts:
    from clearhead.apps.demo.classify import make_name_sets

    sets = make_name_sets(seed=1, valid_per_language=24, test_per_language=24)
    parts = ("train", "valid", "test")
    return write_labelled(
        {split: [(name.text, name.language) for name in getattr(sets, split)] for split in parts}, folder
    )


def sources(cell: Cell, data: Path, folder: Path) -> Parts:
    from clearhead.apps.demo.common import library_sources

    library = library_sources(max_bytes=3_000_000, max_valid_bytes=200_000)
    files = {"train": library.train, "valid": library.valid[::2], "test": library.valid[1::2]}
    cuts = {split: "".join(file.text for file in split_files) for split, split_files in files.items()}
    if cell.task == "generate":
        return running(cuts, folder, {"5-gram": lambda run_folder: ngram_bits(cuts["train"], cuts["test"])})
    lines = {split: cut.splitlines() for split, cut in cuts.items()}
    return running(cuts, folder, {"commonest token": lambda run_folder: guess(run_folder, lines)})


PARTS: dict[str, Callable[[Cell, Path, Path], Parts]] = {
    "translate": translate,
    "embed": embed,
    "generate": generate,
    "fill": captions,
    "denoise": captions,
    "classify": classify,
    "tag": tag,
    "answer": answer,
    "translate-demo": dates,
    "classify-demo": names,
    "generate-demo": sources,
    "fill-demo": sources,
}

if __name__ == "__main__":
    main()
