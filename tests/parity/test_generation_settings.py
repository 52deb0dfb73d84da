"""A checkpoint's generation settings in random combinations: the tokens that transformers' `generate` writes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.base.errors import RunFailure
from clearhead.checkpoints.hf.generation import read_generation_config
from clearhead.generate.generation_config import _UNSUPPORTED, _Settings
from tests.checkpoints.hf import tokenizer_folders

pytestmark = pytest.mark.slow
SIZE, COMBINATIONS = 41, 50
PAD, BOS, EOS = 0, 1, 2
WORDS = ["<pad>", "<s>", "</s>", *(f"w{index}" for index in range(3, SIZE))]
PROMPTS = [[7, 9], [5], [8, 7, 9, 12, 8, 7, 30, 31], [6, 4, 6]]
"""Two, one, eight and three tokens."""
WIDE = {"hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 61, "initializer_range": 0.9},
    "llama": {**WIDE, "num_key_value_heads": 1, "initializer_range": 0.9, "max_position_embeddings": 61},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 22, "num_layers": 1, "num_heads": 2, "initializer_factor": 3.0},
    "bart": {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "init_std": 0.9,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 22, "decoder_ffn_dim": 22, "max_position_embeddings": 61,
    },
}  # fmt: skip
# Without effect on the text: they choose what is returned, or how the same text is computed.
INERT = frozenset(
    """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind cache_config
    cache_implementation compile_config continuous_batching_config disable_compile is_assistant low_memory max_cache_len
    max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states
    output_logits output_scores prefill_chunk_size return_dict_in_generate speculation_type target_lookbehind
    transformers_version use_cache use_mtp
    """.split()
)


def folder_of(model_type: str, folder: Path) -> Path:
    """Save a tiny model whose tokens are words."""
    torch.manual_seed(11)
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": PAD}
    if model_type in ("gpt2", "llama"):
        del ids["decoder_start_token_id"]
    config = transformers.CONFIG_MAPPING[model_type](vocab_size=SIZE, **ids, **CONFIGS[model_type])
    has_encoder = bool(config.is_encoder_decoder)
    kind = transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM
    kind.from_config(config).eval().save_pretrained(folder)
    words = {word: index for index, word in enumerate(WORDS)}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"},
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    return tokenizer_folders.write(folder, {"tokenizer.json": document, "tokenizer_config.json": tokenizer_config})


def some_settings(draw: random.Random, has_encoder: bool) -> dict[str, Any]:
    """Return a random combination of settings."""

    def ids(count: int) -> list[int]:
        return draw.sample(range(SIZE), count)

    beams = draw.choice([1, 1, 2, 3, 4])
    choices: dict[str, Any] = {
        "repetition_penalty": draw.choice([0.8, 1.3]),
        "no_repeat_ngram_size": draw.choice([1, 2, 3]),
        "encoder_no_repeat_ngram_size": draw.choice([1, 2]),
        "min_length": draw.randint(1, 12),
        "min_new_tokens": draw.randint(0, 7),
        "bad_words_ids": [ids(draw.randint(1, 2)) for _ in range(5)] + [[EOS]],
        "suppress_tokens": [*ids(4), *draw.choice([[], [EOS]])],
        "begin_suppress_tokens": [*ids(9), EOS],
        "forced_bos_token_id": draw.choice([3, 4, EOS]),
        "forced_eos_token_id": draw.choice([EOS, 3]),
        "bos_token_id": -1,
        "pad_token_id": -1,
    }
    settings = {key: value for key, value in choices.items() if draw.random() < 0.35}
    # A forced token that is suppressed is refused there, since no token is left.
    forced = {settings.get("forced_bos_token_id"), settings.get("forced_eos_token_id")}
    if "suppress_tokens" in settings:
        settings["suppress_tokens"] = [index for index in settings["suppress_tokens"] if index not in forced]
    settings["eos_token_id"] = draw.choice([EOS, [EOS], [EOS, *ids(2)], [EOS, *ids(3), -1]])
    settings |= draw.choice([{"max_new_tokens": draw.randint(2, 9)}, {"max_length": draw.randint(10, 15)}])
    if beams > 1:
        settings |= {"num_beams": beams, "length_penalty": draw.choice([-1.0, 0.0, 0.6, 1.0, 2.0])}
        settings |= draw.choice([{"early_stopping": chosen} for chosen in (True, False, "never")])
        settings |= draw.choice([{}, {"num_return_sequences": draw.randint(1, beams)}])
    if has_encoder:
        settings["decoder_start_token_id"] = PAD
    return {"do_sample": False, **settings}


def theirs_of(theirs: Any, prompt: list[int], settings: dict[str, Any]) -> tuple[list[list[str]], list[float]]:
    """Return the tokens that transformers writes for one prompt, and the scores of its hypotheses."""
    config = transformers.GenerationConfig(**settings)
    if "early_stopping" not in settings:
        config.early_stopping = "never"
    theirs.generation_config = config
    with torch.no_grad():
        out = theirs.generate(torch.tensor([prompt]), output_scores=True, return_dict_in_generate=True)
    ends = settings["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    sequences = []
    scores = out.get("sequences_scores", torch.zeros(len(out.sequences)))
    is_real = scores > -1e5  # the others extend a hypothesis that does not exist, where too few do
    for row in out.sequences[is_real].tolist():
        ids = row[1 if theirs.config.is_encoder_decoder else len(prompt) :]
        stop = next((position for position, index in enumerate(ids) if index in ends), len(ids) - 1)
        sequences.append([WORDS[index] for index in ids[: stop + 1]])
    return sequences, scores[is_real].tolist()


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("model_type", CONFIGS)
def test_random_combinations_give_the_tokens_of_transformers(model_type: str, tmp_path: Path) -> None:
    """All prompts in one batch here, each alone there."""
    folder = folder_of(model_type, tmp_path / model_type)
    loaded = ch.load(folder, device="cpu", precision="fp32")
    assert loaded.hf_checkpoint is not None
    has_encoder = loaded.module.encoder is not None
    kind = transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM
    theirs = kind.from_pretrained(folder, attn_implementation="eager").eval()
    draw = random.Random(f"{model_type} 1")
    num_ties, lengths = 0, set()
    texts = [" ".join(WORDS[index] for index in prompt) for prompt in PROMPTS]
    for number in range(COMBINATIONS):
        settings = some_settings(draw, has_encoder)
        tokenizer_folders.write(folder, {"generation_config.json": settings})
        config = read_generation_config(folder, loaded.hf_checkpoint.config, loaded.module)
        assert not config.unsupported
        checkpoint = replace(loaded.hf_checkpoint, generation_config=config)
        model = ch.Model(loaded.module, loaded.tokenizers, loaded.task, checkpoint)
        for prompt, sequences in zip(PROMPTS, model.generate(texts), strict=True):
            expected, scores = theirs_of(theirs, prompt, settings)
            actual = [sequence.tokens for sequence in sequences]
            lengths |= set(map(len, actual))
            if actual != expected:
                # Two hypotheses of the same tokens in another order can have one score.
                num_ties += 1
                context = f"combination {number}, prompt {prompt}, {json.dumps(settings)}: {actual} {expected}"
                assert [sequence.score for sequence in sequences] == pytest.approx(scores, rel=1e-5), context
    assert num_ties <= 2 and len(lengths) > 5


def test_every_setting_is_read_or_refused_or_has_no_effect() -> None:
    """A key that a later version of transformers adds fails here."""
    keys = {key for key in vars(transformers.GenerationConfig()) if not key.startswith("_")}
    unknown = keys - INERT - _Settings.model_fields.keys() - _UNSUPPORTED.keys()
    assert not unknown


@pytest.mark.parametrize(
    "banned", [{"suppress_tokens": list(range(SIZE))}, {"bad_words_ids": [[i] for i in range(SIZE)]}]
)
def test_settings_that_ban_every_token_end_in_a_message(banned: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of("gpt2", tmp_path / "m")
    tokenizer_folders.write(folder, {"generation_config.json": {"eos_token_id": [40], "max_new_tokens": 3, **banned}})
    model = ch.load(folder, device="cpu", precision="fp32")
    if "suppress_tokens" in banned:
        with pytest.raises(RunFailure, match="no token may follow"):
            model.generate("w7 w9", temperature=0)
    else:
        assert model.generate("w7 w9", temperature=0)[0].tokens == ["w40"]
