"""Cost of checks when the files of a checkpoint are read, compared with plain calls of the libraries.

    python benchmarks/loading.py --data ../shared/data

The tokenizers are GPT-2's, as `tokenizer.json` and as `vocab.json` with `merges.txt`, and a SentencePiece model with
8,000 pieces trained on the captions. The checkpoint is stories260K. The plain calls are those of `tokenizers`,
`sentencepiece`, `json` and safetensors. All calls are repeated in turns in one process, with the files in the page
cache. The numbers are medians of processor time in milliseconds, which other programs disturb less than the clock.
`load_checkpoint.py` measures matrices of real size.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import sentencepiece
import tokenizers
from pairing import Ratio, Spread
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers

from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.tokenizers import load_tokenizers
from clearhead.text import chat
from clearhead.text.chat import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [{"role": "user", "content": "How many heads has a Transformer?"}]


def processor_seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def merges(folder: Path, data: Path) -> Callable[[], object]:
    """Write GPT-2's tokenizer as vocab.json and merges.txt, and return the plain call that reads it."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(data / "gpt2-tokenizer" / name, folder / name)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')

    def plain() -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return backend

    return plain


def document(folder: Path, data: Path) -> Callable[[], object]:
    """Write GPT-2's tokenizer as tokenizer.json, and return the plain call that reads it."""
    plain = merges(folder, data)
    model = plain()
    assert isinstance(model, tokenizers.Tokenizer)
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(folder / "tokenizer.json"))
    return lambda: tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def pieces(folder: Path, data: Path) -> Callable[[], object]:
    """Write a SentencePiece model, and return the plain call that reads it."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((data / "multi30k" / "train.en").read_text("utf-8").splitlines()[:10000]),
        model_writer=written, vocab_size=8000, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.model").write_bytes(written.getvalue())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    return lambda: sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))


def checkpoint(folder: Path, data: Path) -> Callable[[], object]:
    """Copy a small checkpoint, and return the plain call that reads it; its files take more time than its weights."""
    shutil.copytree(data / "stories260K", folder, dirs_exist_ok=True)
    return lambda: (json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


CASES = {
    "tokenizer.json": (document, load_tokenizers), "vocab.json": (merges, load_tokenizers),
    "SentencePiece": (pieces, load_tokenizers), "checkpoint": (checkpoint, load_module),
}  # fmt: skip


def templates(rounds: int) -> None:
    """Print the cost of chat templates, in this process and in the process that renders them."""
    template = ChatTemplate({"default": TEMPLATE}, {"eos_token": "</s>"})
    began, clock = time.process_time(), time.perf_counter()
    template.render(CHAT)
    processor_time, clock = time.process_time() - began, time.perf_counter() - clock
    worker = chat._worker()._process
    assert worker is not None
    process = psutil.Process(worker.pid)

    def worker_seconds() -> float:
        return sum(process.cpu_times()[:2])

    print(
        f"first template     {1e3 * (processor_time + worker_seconds()):8.1f} ms of processors, "
        f"{1e3 * clock:.1f} ms by the clock"
    )
    for name, new in (("new template", True), ("known template", False)):
        begun, here = worker_seconds(), time.process_time()
        for number in range(rounds):
            ChatTemplate({"default": TEMPLATE + str(number) * new}, {"eos_token": "</s>"}).render(CHAT)
        each = (worker_seconds() - begun + time.process_time() - here) / rounds
        print(f"{name:18} {1e3 * each:8.2f} ms of processors each")


def main() -> None:
    """Measure each kind of file and its plain call in turns, then chat templates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for name, (make, load) in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            plain = make(folder, args.data)
            plain(), load(folder)
            pairs = [
                (processor_seconds(lambda: load(folder)), processor_seconds(plain))  # noqa: B023 called at once
                for _ in range(args.rounds)
            ]
        ours, theirs = ([1e3 * value for value in side] for side in zip(*pairs, strict=True))
        print(f"{name:18} {Spread.of(ours)} ms, plain {Spread.of(theirs)} ms, ratio {Ratio.of(ours, theirs)}")
    templates(200)


if __name__ == "__main__":
    main()
