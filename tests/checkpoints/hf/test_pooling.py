"""Folders of sentence-transformers give the vectors of their recipe, computed here with transformers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import clearhead
from clearhead.base.errors import InputError, LongTexts
from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.saving import save_module
from tests.checkpoints.hf import tokenizer_folders

TEXTS = ["the cat sat", "a small dog runs over the green grass in 1998!", "dog", "the cat and the dog looked at it."]
MODES = {
    "cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "root": "mean_sqrt_len_tokens", "last": "lasttoken",
    "weighted": "weightedmean_tokens",
}  # fmt: skip
WIDTH, OUT, LIMIT = 26, 17, 9
DENSE = {"in_features": WIDTH, "out_features": OUT, "bias": True,
         "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip


def folder_of(
    folder: Path, mode: str, *, dense: dict[str, Any] | None = None, unit: bool = True, cls: str = "BertModel"
) -> Path:
    """Write a tiny encoder with the given modules of sentence-transformers, and return its folder."""
    tokenizer_folders.write(
        folder,
        {"vocab.txt": tokenizer_folders.word_list(), "tokenizer_config.json": {"tokenizer_class": "BertTokenizer"}},
    )
    config = transformers.BertConfig(
        vocab_size=len(tokenizer_folders.word_list().splitlines()),
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=31, max_position_embeddings=29, initializer_range=0.6,
    )  # fmt: skip
    torch.manual_seed(3)
    getattr(transformers, cls)(config).eval().save_pretrained(folder)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    flags = {f"pooling_mode_{name}": word == mode for word, name in MODES.items()}
    files: dict[str, Any] = {"sentence_bert_config.json": {"max_seq_length": LIMIT, "do_lower_case": False}}
    tokenizer_folders.write(folder / "1_Pooling", {"config.json": {"word_embedding_dimension": WIDTH, **flags}})
    if dense is not None:
        kinds.append(("2_Dense", "Dense"))
        tokenizer_folders.write(folder / "2_Dense", {"config.json": dense})
        weights = {"linear.weight": torch.randn(OUT, WIDTH), "linear.bias": torch.randn(OUT)}
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    if unit:
        kinds.append((f"{len(kinds)}_Normalize", "Normalize"))
    files["modules.json"] = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    return tokenizer_folders.write(folder, files)


def recipe(
    folder: Path, mode: str | list[str], *, dense: bool, unit: bool, is_exact: bool = False, prompt: str = ""
) -> np.ndarray:
    """Return the vectors that sentence-transformers computes from the same files."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    model = model.double() if is_exact else model
    texts = [prompt + text for text in TEXTS]
    read = tokenizer(texts, padding=True, truncation=True, max_length=LIMIT, return_tensors="pt")
    with torch.no_grad():
        states, mask = model(**read).last_hidden_state, read["attention_mask"][..., None].to(model.dtype)
    count = mask.sum(1)
    weights = mask * mask.cumsum(1)
    kinds = {
        "cls": lambda: states[:, 0],
        "mean": lambda: (states * mask).sum(1) / count,
        "max": lambda: states.masked_fill(mask == 0, -1e9).max(1).values,
        "root": lambda: (states * mask).sum(1) / count.sqrt(),
        "last": lambda: states[torch.arange(len(states)), count[:, 0].long() - 1],
        "weighted": lambda: (states * weights).sum(1) / weights.sum(1),
    }
    vectors: Tensor = torch.cat([kinds[kind]() for kind in ([mode] if isinstance(mode, str) else mode)], 1)
    if dense:
        dense_weights = load_file(folder / "2_Dense" / "model.safetensors")
        vectors = torch.tanh(
            vectors @ dense_weights["linear.weight"].to(vectors).T + dense_weights["linear.bias"].to(vectors)
        )
    return (torch.nn.functional.normalize(vectors, dim=1) if unit else vectors).numpy()


def vectors_of(folder: Path, *, is_exact: bool = False) -> np.ndarray:
    model = clearhead.load(folder, precision="fp32", device="cpu")
    if is_exact:
        model.module.double()
    with pytest.warns(LongTexts, match="2 texts"):
        return model.embed(TEXTS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dense", "unit"), [(False, True), (True, False)])
def test_vectors_are_those_of_the_recipe(mode: str, dense: bool, unit: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", mode, dense=DENSE if dense else None, unit=unit)
    # In float64, since fp32 moves some of these vectors by 1e-5: the recipe is compared; results are float32.
    vectors = vectors_of(folder, is_exact=True)
    expected = recipe(folder, mode, dense=dense, unit=unit, is_exact=True)
    assert vectors.shape == expected.shape and np.abs(vectors - expected).max() <= 1e-7 * np.abs(expected).max()


def assert_same_after_saving(folder: Path, expected: np.ndarray) -> None:
    """Check the vectors after saving as a checkpoint, as a run, and as a checkpoint made from this run."""
    again, run, new = (folder.parent / name for name in ("again", "run", "new"))
    clearhead.load(folder, precision="fp32", device="cpu").save(again, format="hf")
    clearhead.load(folder, precision="fp32", device="cpu").save(run)
    clearhead.load(run, precision="fp32", device="cpu").save(new, format="hf")
    for saved in (again, run, new):
        assert np.allclose(vectors_of(saved), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"pooling_mode": ["lasttoken", "cls", "weightedmean"]}, ["last", "cls", "weighted"]),
        ({"pooling_mode": ["mean"]}, ["mean"]),
        ({"pooling_mode": "weightedmean", "pooling_mode_mean_tokens": True}, ["weighted"]),
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            ["max", "mean", "last"],
        ),
        ({"pooling_mode_mean_tokens": False}, ["mean"]),
        ({}, ["mean"]),
    ],
)
def test_several_kinds_of_pooling_are_joined(settings: dict[str, Any], modes: list[str], tmp_path: Path) -> None:
    """Test the order of a list, the library's order for flags, and the mean without either."""
    folder = folder_of(tmp_path / "m", "mean")
    tokenizer_folders.write(folder / "1_Pooling", {"config.json": {"embedding_dimension": WIDTH, **settings}})
    vectors = vectors_of(folder)
    assert vectors.shape == (len(TEXTS), WIDTH * len(modes))
    assert np.allclose(vectors, recipe(folder, modes, dense=False, unit=True), atol=1e-6)
    assert_same_after_saving(folder, vectors)


def test_a_linear_layer_follows_the_joined_vectors(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "mean", dense={**DENSE, "in_features": 2 * WIDTH}, unit=False)
    weights = {"linear.weight": torch.randn(OUT, 2 * WIDTH), "linear.bias": torch.randn(OUT)}
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    tokenizer_folders.write(folder / "1_Pooling", {"config.json": {"pooling_mode": ["mean", "weightedmean"]}})
    vectors = vectors_of(folder)
    assert np.allclose(vectors, recipe(folder, ["mean", "weighted"], dense=True, unit=False), atol=1e-5)
    assert_same_after_saving(folder, vectors)


@pytest.mark.parametrize(
    ("prompts", "prompt"),
    [
        ({"prompts": {"query": "the cat: ", "document": ""}, "default_prompt_name": "query"}, "the cat: "),
        ({"prompts": {"query": "the cat: ", "document": ""}, "default_prompt_name": "document"}, ""),
        ({"prompts": {"query": "the cat: "}, "default_prompt_name": None}, ""),
        ({"default_prompt_name": "query"}, ""),
    ],
)
def test_the_default_prompt_stands_in_front_of_every_text(prompts: dict[str, Any], prompt: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "mean")
    tokenizer_folders.write(folder, {"config_sentence_transformers.json": prompts})
    vectors = vectors_of(folder)
    assert np.allclose(vectors, recipe(folder, "mean", dense=False, unit=True, prompt=prompt), atol=1e-6)
    assert_same_after_saving(folder, vectors)
    model = clearhead.load(folder, precision="fp32", device="cpu")
    read = model.attention("dog").tokens
    assert read[1:-1] == model.tokenizer.tokens(model.tokenizer.encode(f"{prompt}dog"))


def test_a_head_of_the_class_counts_for_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "mean", cls="BertForMaskedLM")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    vectors = vectors_of(folder)
    assert np.allclose(vectors, recipe(folder, "mean", dense=False, unit=True), atol=1e-6)
    loaded = load_module(folder)
    assert any("but not used by" in note for note in loaded.notes)


@pytest.mark.parametrize("dense", [False, True])
def test_saved_as_loaded(dense: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "cls", dense=DENSE if dense else None)
    loaded = load_module(folder)
    save_module(loaded.module, tmp_path / "again", loaded=loaded)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json"))
    for name in (file_name for file_name in names if not file_name.startswith(("tokenizer", "vocab", "generation"))):
        assert json.loads((folder / name).read_text()) == json.loads((tmp_path / "again" / name).read_text()), name
    for name in (str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")):
        before, after = load_file(folder / name), load_file(tmp_path / "again" / name)
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_saved_from_the_spec_it_is_read_again(tmp_path: Path) -> None:
    loaded = load_module(folder_of(tmp_path / "m", "root", dense=DENSE))
    save_module(loaded.module, tmp_path / "again", task=loaded.task)
    again = load_module(tmp_path / "again")
    assert again.module.spec == loaded.module.spec and again.task == loaded.task
    assert all(
        torch.equal(tensor, again.module.state_dict()[name]) for name, tensor in loaded.module.state_dict().items()
    )


SBERT, TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"
POSITIONS = 29
LENGTHS: list[tuple[dict[str, dict[str, Any]], int]] = [
    ({}, POSITIONS),
    ({SBERT: {"max_seq_length": 12}, TOKENIZER: {"model_max_length": 20}}, 12),
    ({SBERT: {"max_seq_length": 25}, TOKENIZER: {"model_max_length": 20}}, 25),
    ({SBERT: {"max_seq_length": None}, TOKENIZER: {"model_max_length": 20}}, 20),
    ({SBERT: {"transformer_task": "feature-extraction"}, TOKENIZER: {"model_max_length": 20}}, 20),
    ({TOKENIZER: {"model_max_length": 40}}, POSITIONS),
    ({TOKENIZER: {"model_max_length": 1000000000000000019884624838656}}, POSITIONS),
    ({TOKENIZER: {"model_max_length": None, "max_length": 9}}, POSITIONS),
    ({TOKENIZER: {"max_len": 9}}, 9),
    ({SBERT: {"processor_kwargs": {"model_max_length": 15}}, TOKENIZER: {"model_max_length": 20}}, 15),
    ({SBERT: {"tokenizer_args": {"model_max_length": 15}, "max_seq_length": 12}}, 15),
    ({SBERT: {"processing_kwargs": {"text": {"max_length": 8}}, "max_seq_length": 12}}, 8),
    ({SBERT: {"processing_kwargs": {"common": {"max_length": 8}}}}, 8),
    ({SBERT: {"query_length": 5, "document_length": 6}}, POSITIONS),
    ({"sentence_roberta_config.json": {"max_seq_length": 12}, TOKENIZER: {"model_max_length": 20}}, 12),
    ({SBERT: {"transformer_task": "feature-extraction"}, "sentence_roberta_config.json": {"max_seq_length": 12}}, 29),
]
"""Files of settings, and the number of tokens that sentence-transformers 6.2 reads from a longer text."""


@pytest.mark.parametrize(("files", "expected"), LENGTHS)
@pytest.mark.parametrize("truncation", [None, 10])
def test_a_text_is_cut_where_sentence_transformers_cuts_it(
    files: dict[str, dict[str, Any]], expected: int, truncation: int | None, tmp_path: Path
) -> None:
    """Test a length in each of the files; a truncation in tokenizer.json has no effect."""
    folder = folder_of(tmp_path / "m", "mean", unit=False)
    (folder / SBERT).unlink()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if truncation is not None:
        rule = {"direction": "Right", "max_length": truncation, "strategy": "LongestFirst", "stride": 0}
        change_settings(folder, "tokenizer.json", truncation=rule)
    change_settings(folder, TOKENIZER, model_max_length=None)
    for name, entries in files.items():
        change_settings(folder, name, **entries)
    text = " ".join(["the", "dog", "sat"] * 40)
    model = clearhead.load(folder, precision="fp32", device="cpu")
    with pytest.warns(LongTexts, match=f"{expected} tokens"):
        (vector,) = model.embed([text])
    read = tokenizer(text, truncation=True, max_length=expected, return_tensors="pt")
    theirs = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        assert np.allclose(vector, theirs(**read).last_hidden_state[0].mean(0), atol=1e-5)
    model.save(tmp_path / "again", format="hf")
    with pytest.warns(LongTexts, match=f"{expected} tokens"):
        (again,) = clearhead.load(tmp_path / "again", precision="fp32", device="cpu").embed([text])
    assert np.array_equal(again, vector)


def change_settings(folder: Path, file: str, **entries: Any) -> None:
    path = folder / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | entries))


def change_module(folder: Path, index: int, **entries: Any) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[index] |= entries
    (folder / "modules.json").write_text(json.dumps(modules))


BROKEN = {
    "a pool of another kind": (
        lambda f: change_settings(f, "1_Pooling/config.json", pooling_mode=["mean", "attention"]),
        "attention is not supported; supported pooling modes: cls, max, mean",
    ),
    "an unknown flag": (
        lambda f: change_settings(f, "1_Pooling/config.json", pooling_mode_attention=True),
        "pooling_mode_attention is not supported",
    ),
    "another length": (
        lambda f: change_settings(f, "sentence_bert_config.json", processing_kwargs={"text": {"truncation": False}}),
        "processing_kwargs.text.truncation",
    ),
    "another width": (
        lambda f: change_settings(f, "1_Pooling/config.json", word_embedding_dimension=7),
        "the pool has a width of 7; expected 26",
    ),
    "an unknown module": (
        lambda f: change_module(f, 1, type="sentence_transformers.models.CNN"),
        "a module of the type sentence_transformers.models.CNN is not supported",
    ),
    "another first module": (
        lambda f: change_module(f, 0, type="sentence_transformers.models.BoW"),
        "expected a Transformer in '' as the first entry only",
    ),
    "a map of another size": (
        lambda f: change_settings(f, "2_Dense/config.json", in_features=7),
        "a linear layer has 7 inputs and 17 outputs; expected 26 inputs",
    ),
    "tensors of another size": (
        lambda f: save_file({"linear.weight": torch.zeros(3, 3)}, f / "2_Dense" / "model.safetensors"),
        "2_Dense/model.safetensors holds",
    ),
    "an activation": (
        lambda f: change_settings(f, "2_Dense/config.json", activation_function="torch.nn.modules.activation.Softplus"),
        "activation torch.nn.modules.activation.Softplus is not supported",
    ),
    "a folder above": (lambda f: change_module(f, 2, path="../elsewhere"), "is not the name of a file in this folder"),
    "lower case": (
        lambda f: change_settings(f, "sentence_bert_config.json", do_lower_case=True),
        "do_lower_case = true is not supported",
    ),
    "a prompt without a text": (
        lambda f: change_settings(
            f, "config_sentence_transformers.json", prompts={"a": "b"}, default_prompt_name="passage"
        ),
        "default_prompt_name is 'passage', but prompts has no entry of this name",
    ),
    "a prompt that is left out of the pool": (
        lambda f: (
            change_settings(
                f, "config_sentence_transformers.json", prompts={"query": "q: "}, default_prompt_name="query"
            ),
            change_settings(f, "1_Pooling/config.json", include_prompt=False),
        ),
        "a default prompt is not supported together with include_prompt = false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_ours_is_refused(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "mean", dense=DENSE)
    change, sentence = BROKEN[name]
    change(folder)
    with pytest.raises(InputError, match=sentence.replace("(", r"\(")):
        load_module(folder)
