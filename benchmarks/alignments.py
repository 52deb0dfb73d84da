"""Word alignments of the best heads and of the mean of the last layer, beside known answers and beside eflomal's.

    python benchmarks/alignments.py FOLDER words
    python benchmarks/alignments.py FOLDER dates
    python benchmarks/alignments.py FOLDER captions MULTI30K_BPE [--eflomal eflomal-align]

Each trains a model in FOLDER, unless there is one. `words`: invented sentences, translated word for word with pairs of
neighbours swapped. `dates`: the dates of `clearhead demo`, written as "1998 01 05", in which the words of year, month
and day are known. `captions`: German to English; eflomal aligns the training pairs together with the translations, and
what both of its directions say is taken as sure, what one of them says as possible (Och and Ney 2003: AER).
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


def trained(
    run: Path, pairs: Pairs, tokenizer: dict[str, Any], recipe: dict[str, Any], valid: Pairs | None = None
) -> ch.Model:
    if not run.exists():
        data: dict[str, Any] = {"max_length": 128} | ({"valid": 0.02} if valid is None else {})
        tables = {"task": {"kind": "translate"}, "data": data, "tokenizer": tokenizer, "model": recipe["model"]}
        tables |= {"train": recipe["train"] | {"run": str(run), "seed": 1}}
        ch.train(tables, data={"train": list(pairs)} | ({} if valid is None else {"valid": list(valid)}))
    return ch.load(run, device="cpu", precision="fp32")


def parsed(alignment: str | None) -> Links:
    links = [link.split("-") for link in (alignment or "").split()]
    return {(int(source), int(target)) for source, target in links}


def aligned(model: ch.Model, texts: Sequence[str]) -> tuple[list[str], dict[str, list[Links]]]:
    """Return translations, and their alignments by the best heads and by those of the last layer."""
    module = model.module
    last = len(module.decoder.order) - 1
    heads = module.decoder.layers[module.decoder.order[last]].steps[1].branches[0].function.spec.num_heads
    ways: dict[str, Any] = {"best heads": True, "mean of the last layer": [(last, head) for head in range(heads)]}
    found = {}
    for name, chosen in ways.items():
        translations = model.translate_n_best(list(texts), n=1, beam_size=1, alignments=chosen)
        found[name] = [parsed(one[0].alignment) for one in translations]
    return [one[0].text for one in translations], found


def common(found: Sequence[Links], known: Sequence[Links]) -> int:
    return sum(len(one & other) for one, other in zip(found, known, strict=True))


def report(model: ch.Model, texts: Sequence[str], targets: Sequence[str], known: Sequence[Links]) -> None:
    """Print precision, recall and F1 where the translation is right."""
    written, ways = aligned(model, texts)
    right = [place for place, text in enumerate(written) if text == targets[place]]
    print(f"{len(right)} of {len(texts)} translations are right, and compared")
    answers = [known[place] for place in right]
    for name, links in ways.items():
        found = [links[place] for place in right]
        both, sizes = common(found, answers), [sum(map(len, one)) for one in (found, answers)]
        rates = f"precision {both / sizes[0]:.3f}, recall {both / sizes[1]:.3f}, F1 {2 * both / sum(sizes):.3f}"
        print(f"{name}: {rates}")


def words(folder: Path) -> None:
    draw = random.Random(1)

    def spelled(consonants: str) -> str:
        return "".join(draw.choice(("aeiou", consonants)[place % 2]) for place in range(1, draw.randint(4, 7)))

    lexicon = {spelled("bdgklm"): spelled("pstfrn") for _ in range(150)}
    texts, targets, known = [], [], []
    for _ in range(12_000):
        text = draw.choices(sorted(lexicon), k=draw.randint(3, 9))
        order = [place ^ 1 if place ^ 1 < len(text) else place for place in range(len(text))]
        texts.append(" ".join(text))
        targets.append(" ".join(lexicon[text[place]] for place in order))
        known.append({(place, target) for target, place in enumerate(order)})
    pairs = list(zip(texts, targets, strict=True))
    model = trained(folder / "words", pairs[500:], {"kind": "bpe", "vocab_size": 120, "joint": False}, SMALL)
    report(model, texts[:500], targets[:500], known[:500])


def dates(folder: Path) -> None:
    draw, styles = random.Random(1), date_styles()[0]
    texts, targets, known = [], [], []
    for _ in range(60_000):
        date = datetime.date(1900, 1, 1) + datetime.timedelta(draw.randrange(60_000))
        style = draw.choice(styles)
        axes = {axis: place for place, (axis, _) in enumerate(style.parts)}
        tables = (0, date.year - FIRST_YEAR, date.month - 1, date.day - 1, date.weekday())
        row = [table[tables[axis]] for axis, table in style.parts]
        starts = {axis: len(("".join(row[: axes[axis]]) + row[axes[axis]].lstrip()[:1]).split()) for axis in (1, 2, 3)}
        texts.append("".join(row))
        targets.append(date.isoformat().replace("-", " "))
        known.append({(start - 1, axis - 1) for axis, start in starts.items()})
    pairs = list(zip(texts, targets, strict=True))
    model = trained(folder / "dates", pairs[2000:], {"kind": "character", "joint": False}, SMALL)
    # Where year, month and day are words of their own.
    apart = [place for place in range(2000) if len({source for source, _ in known[place]}) == 3]
    report(model, *([column[place] for place in apart] for column in (texts, targets, known)))


def captions(folder: Path, data: Path, eflomal: str) -> None:
    def read(name: str) -> list[str]:
        return (data / name).read_text("utf-8").replace("@@ ", "").splitlines()

    train, valid = (list(zip(read(f"{part}.de"), read(f"{part}.en"), strict=True)) for part in ("train", "valid"))
    model = trained(folder / "captions", train, {"kind": "bpe", "vocab_size": 6000, "joint": True}, CAPTIONS, valid)
    texts = read("test.2016.de")
    written, ways = aligned(model, texts)
    everything = [*train, *zip(texts, written, strict=True)]
    for name, column in (("all.de", 0), ("all.en", 1)):
        (folder / name).write_text("".join(f"{pair[column]}\n" for pair in everything), "utf-8")
    source, target, forward, reverse = (folder / name for name in ("all.de", "all.en", "forward", "reverse"))
    command = [eflomal, "-s", source, "-t", target, "-f", forward, "-r", reverse, "--overwrite"]
    subprocess.run(command, check=True, capture_output=True)
    one, other = ([*map(parsed, file.read_text().splitlines()[len(train) :])] for file in (forward, reverse))
    sure = [first & second for first, second in zip(one, other, strict=True)]
    possible = [first | second for first, second in zip(one, other, strict=True)]
    print(
        f"eflomal: {sum(map(len, sure))} sure links, {sum(map(len, possible))} possible ones, {len(texts)} translations"
    )
    for name, found in ways.items():
        size, size_of_sure = sum(map(len, found)), sum(map(len, sure))
        in_sure, in_possible = common(found, sure), common(found, possible)
        rates = f"precision {in_possible / size:.3f}, recall {in_sure / size_of_sure:.3f}"
        print(f"{name}: {size} links, {rates}, AER {1 - (in_sure + in_possible) / (size + size_of_sure):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", choices=["words", "dates", "captions"])
    parser.add_argument("multi30k", type=Path, nargs="?", help="the folder multi30k-bpe, for captions")
    parser.add_argument("--layers", type=int, default=2, help="of the model of words or dates")
    parser.add_argument("--steps", type=int, default=1000, help="of its training")
    parser.add_argument("--eflomal", default="eflomal-align", help="the command of `pip install eflomal`")
    options = parser.parse_args()
    if options.data == "captions":
        captions(options.folder, options.multi30k, options.eflomal)
    else:
        SMALL["model"]["layers"], SMALL["train"]["steps"] = options.layers, options.steps
        {"words": words, "dates": dates}[options.data](options.folder)


if __name__ == "__main__":
    main()
