"""Word alignments from the best heads and the mean of the last layer, compared with known alignments and eflomal.

    python benchmarks/alignments.py FOLDER words
    python benchmarks/alignments.py FOLDER dates
    python benchmarks/alignments.py FOLDER captions MULTI30K_BPE [--eflomal eflomal-align]

Each command trains a model in FOLDER, unless there is one. `words` has invented sentences, translated word for word,
with neighbouring pairs swapped. `dates` has the dates of `clearhead demo`, written as "1998 01 05", so that the words
of year, month and day are known. `captions` translates German to English. There eflomal aligns the training pairs
together with the translations. Links of both directions are sure, links of one direction possible (Och and Ney 2003:
AER).
"""

from __future__ import annotations

import argparse
import datetime
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clearhead as ch
from clearhead.apps.demo.translate import FIRST_YEAR, date_styles

Links = set[tuple[int, int]]
Pairs = Sequence[tuple[str, str]]
SMALL: dict[str, Any] = {
    "model": {"layers": 2, "width": 64, "heads": 4, "feedforward": 128, "norm_place": "pre", "positions": "rotary"},
    "train": {"steps": 1000, "batch_tokens": 2600, "optimizer": "muon", "learning_rate": 0.012, "warmup": 100,
              "schedule": "cosine", "clip": 1.0, "bleu_sentences": 0, "validate_every": 500, "threads": 1},
}  # fmt: skip
CAPTIONS: dict[str, Any] = {
    "model": {"layers": 4, "width": 128, "heads": 4, "feedforward": 512, "dropout": 0.2, "norm_place": "pre",
              "positions": "rotary", "norm": "rms", "tie": "all"},
    "train": {"steps": 2000, "batch_tokens": 2048, "optimizer": "muon", "learning_rate": 8e-3, "warmup": 200,
              "schedule": "cosine", "label_smoothing": 0.1, "clip": 1.0, "bleu_sentences": 100, "validate_every": 500,
              "threads": 1},
}  # fmt: skip


def train_model(
    run: Path, pairs: Pairs, tokenizer: dict[str, Any], recipe: dict[str, Any], valid: Pairs | None = None
) -> ch.Model:
    if not run.exists():
        data: dict[str, Any] = {"max_length": 128} | ({"valid": 0.02} if valid is None else {})
        tables = {"task": {"kind": "translate"}, "data": data, "tokenizer": tokenizer, "model": recipe["model"]}
        tables |= {"train": recipe["train"] | {"run": str(run), "seed": 1}}
        ch.train(tables, data={"train": list(pairs)} | ({} if valid is None else {"valid": list(valid)}))
    return ch.load(run, device="cpu", precision="fp32")


def parse_links(alignment: str | None) -> Links:
    links = [link.split("-") for link in (alignment or "").split()]
    return {(int(source), int(target)) for source, target in links}


def align(model: ch.Model, texts: Sequence[str]) -> tuple[list[str], dict[str, list[Links]]]:
    """Return translations, and their alignments by the best heads and by the mean of the last layer."""
    module = model.module
    last = len(module.decoder.order) - 1
    heads = module.decoder.layers[module.decoder.order[last]].steps[1].branches[0].function.spec.num_heads
    ways: dict[str, Any] = {"best heads": True, "mean of the last layer": [(last, head) for head in range(heads)]}
    links_by_method = {}
    for name, chosen in ways.items():
        translations = model.translate_n_best(list(texts), n=1, beam_size=1, alignments=chosen)
        links_by_method[name] = [parse_links(translation[0].alignment) for translation in translations]
    return [translation[0].text for translation in translations], links_by_method


def common(predicted: Sequence[Links], known: Sequence[Links]) -> int:
    return sum(len(predicted_links & other) for predicted_links, other in zip(predicted, known, strict=True))


def report(model: ch.Model, texts: Sequence[str], targets: Sequence[str], known: Sequence[Links]) -> None:
    """Print precision, recall and F1 of the alignments of correct translations."""
    written, ways = align(model, texts)
    right = [index for index, text in enumerate(written) if text == targets[index]]
    print(f"{len(right)} of {len(texts)} translations are correct; only these are compared")
    answers = [known[index] for index in right]
    for name, links in ways.items():
        predicted = [links[index] for index in right]
        both, sizes = common(predicted, answers), [sum(map(len, links)) for links in (predicted, answers)]
        rates = f"precision {both / sizes[0]:.3f}, recall {both / sizes[1]:.3f}, F1 {2 * both / sum(sizes):.3f}"
        print(f"{name}: {rates}")


def words(folder: Path) -> None:
    draw = random.Random(1)

    def spell(consonants: str) -> str:
        return "".join(draw.choice(("aeiou", consonants)[index % 2]) for index in range(1, draw.randint(4, 7)))

    lexicon = {spell("bdgklm"): spell("pstfrn") for _ in range(150)}
    texts, targets, known = [], [], []
    for _ in range(12_000):
        text = draw.choices(sorted(lexicon), k=draw.randint(3, 9))
        order = [index ^ 1 if index ^ 1 < len(text) else index for index in range(len(text))]
        texts.append(" ".join(text))
        targets.append(" ".join(lexicon[text[index]] for index in order))
        known.append({(index, target) for target, index in enumerate(order)})
    pairs = list(zip(texts, targets, strict=True))
    model = train_model(folder / "words", pairs[500:], {"kind": "bpe", "vocab_size": 120, "joint": False}, SMALL)
    report(model, texts[:500], targets[:500], known[:500])


def dates(folder: Path) -> None:
    draw, styles = random.Random(1), date_styles()[0]
    texts, targets, known = [], [], []
    for _ in range(60_000):
        date = datetime.date(1900, 1, 1) + datetime.timedelta(draw.randrange(60_000))
        style = draw.choice(styles)
        axes = {axis: index for index, (axis, _) in enumerate(style.parts)}
        tables = (0, date.year - FIRST_YEAR, date.month - 1, date.day - 1, date.weekday())
        row = [table[tables[axis]] for axis, table in style.parts]
        starts = {axis: len(("".join(row[: axes[axis]]) + row[axes[axis]].lstrip()[:1]).split()) for axis in (1, 2, 3)}
        texts.append("".join(row))
        targets.append(date.isoformat().replace("-", " "))
        known.append({(start - 1, axis - 1) for axis, start in starts.items()})
    pairs = list(zip(texts, targets, strict=True))
    model = train_model(folder / "dates", pairs[2000:], {"kind": "character", "joint": False}, SMALL)
    # Only styles in which year, month and day are separate words.
    apart = [index for index in range(2000) if len({source for source, _ in known[index]}) == 3]
    report(model, *([column[index] for index in apart] for column in (texts, targets, known)))


def captions(folder: Path, data: Path, eflomal: str) -> None:
    def read(name: str) -> list[str]:
        return (data / name).read_text("utf-8").replace("@@ ", "").splitlines()

    train, valid = (list(zip(read(f"{split}.de"), read(f"{split}.en"), strict=True)) for split in ("train", "valid"))
    model = train_model(folder / "captions", train, {"kind": "bpe", "vocab_size": 6000, "joint": True}, CAPTIONS, valid)
    texts = read("test.2016.de")
    written, ways = align(model, texts)
    everything = [*train, *zip(texts, written, strict=True)]
    for name, column in (("all.de", 0), ("all.en", 1)):
        (folder / name).write_text("".join(f"{pair[column]}\n" for pair in everything), "utf-8")
    source, target, forward, reverse = (folder / name for name in ("all.de", "all.en", "forward", "reverse"))
    command = [eflomal, "-s", source, "-t", target, "-f", forward, "-r", reverse, "--overwrite"]
    subprocess.run(command, check=True, capture_output=True)
    forward_links, reverse_links = (
        [*map(parse_links, file.read_text().splitlines()[len(train) :])] for file in (forward, reverse)
    )
    sure = [first & second for first, second in zip(forward_links, reverse_links, strict=True)]
    possible = [first | second for first, second in zip(forward_links, reverse_links, strict=True)]
    print(
        f"eflomal: {sum(map(len, sure))} sure links, {sum(map(len, possible))} possible ones, {len(texts)} translations"
    )
    for name, predicted in ways.items():
        size, size_of_sure = sum(map(len, predicted)), sum(map(len, sure))
        in_sure, in_possible = common(predicted, sure), common(predicted, possible)
        rates = f"precision {in_possible / size:.3f}, recall {in_sure / size_of_sure:.3f}"
        print(f"{name}: {size} links, {rates}, AER {1 - (in_sure + in_possible) / (size + size_of_sure):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", choices=["words", "dates", "captions"])
    parser.add_argument("multi30k", type=Path, nargs="?", help="the folder multi30k-bpe, for captions")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model for words or dates")
    parser.add_argument("--steps", type=int, default=1000, help="steps of its training")
    parser.add_argument("--eflomal", default="eflomal-align", help="the command of `pip install eflomal`")
    options = parser.parse_args()
    if options.data == "captions":
        captions(options.folder, options.multi30k, options.eflomal)
    else:
        SMALL["model"]["layers"], SMALL["train"]["steps"] = options.layers, options.steps
        {"words": words, "dates": dates}[options.data](options.folder)


if __name__ == "__main__":
    main()
