"""Checkpoints of `large.py`: shapes of released Llama models, random weights in bf16, and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END = "<|end|>"
SHARD = 1_600_000_000
"""Maximum bytes of a shard; a checkpoint of 3 billion weights has four shards."""
BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 18 / 32, "BF16": 2, "Q8_0": 34 / 32, "Q4_0": 18 / 32}
"""Bytes per weight; groups of 32 have a scale of two bytes."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Args:
        layers, width, feedforward, heads, kv_heads, head_size, vocabulary: the sizes.
        is_tied: True if the output matrix is the token embedding.
        positions: the maximum sequence length in tokens.
    """

    layers: int
    width: int
    feedforward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool = True
    positions: int = 131_072

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": self.width,
            "intermediate_size": self.feedforward, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_size,
            "vocab_size": self.vocabulary, "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": self.positions, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
            "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each tensor of the file."""
        width, rows, key_rows = self.width, self.heads * self.head_size, self.kv_heads * self.head_size
        yield "model.embed_tokens.weight", (self.vocabulary, width)
        for layer in range(self.layers):
            stem = f"model.layers.{layer}"
            yield f"{stem}.input_layernorm.weight", (width,)
            yield f"{stem}.self_attn.q_proj.weight", (rows, width)
            yield f"{stem}.self_attn.k_proj.weight", (key_rows, width)
            yield f"{stem}.self_attn.v_proj.weight", (key_rows, width)
            yield f"{stem}.self_attn.o_proj.weight", (width, rows)
            yield f"{stem}.post_attention_layernorm.weight", (width,)
            for name in ("gate_proj", "up_proj"):
                yield f"{stem}.mlp.{name}.weight", (self.feedforward, width)
            yield f"{stem}.mlp.down_proj.weight", (width, self.feedforward)
        yield "model.norm.weight", (width,)
        if not self.is_tied:
            yield "lm_head.weight", (self.vocabulary, width)

    def numbers_of_a_step(self) -> int:
        """Return the weights that a decoding step reads: the matrices of all layers and of the output."""
        sizes = {name: shape[0] * shape[-1] for name, shape in self.tensors() if len(shape) == 2}
        table = sizes.pop("model.embed_tokens.weight")
        return sum(sizes.values()) + (table if self.is_tied else 0)


SHAPES = {
    "0.3": Shape(20, 1024, 3072, 16, 8, 64, 32_000),
    "1": Shape(16, 2048, 8192, 32, 8, 64, 128_256),
    "3": Shape(28, 3072, 8192, 24, 8, 128, 128_256),
    "7": Shape(32, 4096, 11_008, 32, 32, 128, 32_000, is_tied=False, positions=4096),
}
"""Shapes by billions of weights: a small one, Llama 3.2 1B and 3B, Llama 2 7B."""


def write_checkpoint(shape: Shape, folder: Path) -> Path:
    """Write a checkpoint shard by shard, if the folder has none."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    for name, sizes in shape.tensors():
        if sum(_bytes(other) for _, other in shards[-1]) + _bytes(sizes) > SHARD and shards[-1]:
            shards.append([])
        shards[-1].append((name, sizes))
    placed = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            name: torch.ones(sizes, dtype=torch.bfloat16)
            if len(sizes) == 1
            else torch.empty(sizes, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
            for name, sizes in shard
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": sum(_bytes(sizes) for _, sizes in shape.tensors())}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(shape.vocabulary, folder)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    return folder


def _bytes(sizes: tuple[int, ...]) -> int:
    return 2 * sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


def token_names(vocabulary: int) -> list[str]:
    """Return the entries of the tokenizer: the end token, the bytes, and fillers that occur in no text."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = [END, *sorted(ByteLevel.alphabet())]
    return [*names, *(f"<filler{number}>" for number in range(vocabulary - len(names)))]


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Write a tokenizer with one token per byte, so that a text of N letters has N tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = token_names(vocabulary)
    backend = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([END])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_gguf(shape: Shape, folder: Path, file: Path, kind_name: str) -> Path:
    """Write the GGUF file of a checkpoint if it is missing: vectors in fp32, matrices in BF16, Q8_0 or Q4_0."""
    if file.exists():
        return file
    import gguf
    from safetensors import safe_open

    kind = gguf.GGMLQuantizationType[kind_name]
    unfinished = file.with_suffix(".unfinished")
    # Keep tensors in a file, not in memory.
    writer = gguf.GGUFWriter(unfinished, "llama", use_temp_file=True)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.feedforward)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type({"BF16": 32, "Q8_0": 7, "Q4_0": 2}[kind_name])
    names = token_names(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([3] + [1] * (len(names) - 1))
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    placed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, shard in placed.items():
        with safe_open(folder / shard, framework="pt") as opened:
            # Do not permute the rows of queries and keys: with random weights only the speed counts.
            numbers = opened.get_tensor(name).float().numpy()
        of = gguf.GGMLQuantizationType.F32 if numbers.ndim == 1 else kind
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(numbers, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(file)


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, leaf = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{leaf}"
    _, _, layer, *inner = stem.split(".")
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    return f"blk.{layer}.{names['.'.join(inner)]}.{leaf}"
