"""`model.attention` reads tokens like the predictions; weights are exact, files are complete, refusals are clear."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.interpret.maps.attention_maps import AttentionMaps, thumbnails
from clearhead.interpret.maps.hook_points import capture
from clearhead.model.facade import Model
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests import hf_models
from tests.tasks import fine_tuning

LAYERS, HEADS = 3, 2
TEXT, TARGET = "abc de", "fa cb"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("character", ["abcdefgh .,x_"], vocab_size=40, mask=True)


def model_of(tokenizer: Tokenizer, family: str, kind: str, **changes: object) -> Model:
    torch.manual_seed(5)
    hparams = Hyperparameters(family=family, layers=LAYERS, width=14, heads=HEADS, feedforward=17, tie="none")
    size = tokenizer.vocab_size
    module = ch.build(build_spec(hparams, source_vocab=size, target_vocab=size)).eval()
    return Model(module, TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind=kind, **changes))


@pytest.fixture(scope="module")
def models(tokenizer: Tokenizer) -> dict[str, Model]:
    return {
        "encoder": model_of(tokenizer, "encoder", "fill"),
        "decoder": model_of(tokenizer, "decoder", "generate"),
        "encoder-decoder": model_of(tokenizer, "encoder-decoder", "translate"),
        "reader": model_of(tokenizer, "encoder", "answer"),
    }


@pytest.fixture(scope="module")
def pair_maps(models: dict[str, Model]) -> AttentionMaps:
    return models["encoder-decoder"].attention(TEXT, TARGET)


@torch.no_grad()
def test_weights_of_two_stacks_are_those_of_one_teacher_forced_pass(
    models: dict[str, Model], pair_maps: AttentionMaps
) -> None:
    model, maps = models["encoder-decoder"], pair_maps
    vocabulary = model.tokenizer
    source, target = vocabulary.encode(TEXT), vocabulary.encode(TARGET)
    read = torch.tensor([[*source, vocabulary.eos_id]]), torch.tensor([[vocabulary.bos_id, *target]])
    assert maps.tokens == vocabulary.tokens(read[0][0].tolist())
    assert maps.target_tokens == vocabulary.tokens(read[1][0].tolist())
    assert maps.inputs.labels == (*target, vocabulary.eos_id)
    assert maps.stacks == ("encoder.self", "decoder.self", "decoder.memory")
    with capture(model.module, "**.weights") as seen:
        model.module(*read)
    sizes = {"encoder.self": (7, 7), "decoder.self": (6, 6), "decoder.memory": (6, 7)}
    for stack in maps.stacks:
        assert maps.layers(stack) == (0, 1, 2)
        step = 1 if stack == "decoder.memory" else 0
        for layer in maps.layers(stack):
            path = f"{stack.split('.')[0]}.layers.{layer}.steps.{step}.branches.0.function.weights"
            whole = maps.weights(stack, layer=layer)
            assert whole.dtype == torch.float32 and whole.shape == (HEADS, *sizes[stack])
            assert torch.equal(whole, seen.tensor(path)[0])
            assert (len(maps.query_tokens(stack)), len(maps.key_tokens(stack))) == sizes[stack]
            for head in range(maps.num_heads(stack, layer)):
                alone = maps.weights(stack, layer=layer, head=head, queries=slice(1, 4))
                assert (alone - whole[head, 1:4]).abs().max() <= 1e-6


def test_a_target_that_is_not_given_is_the_greedy_translation(models: dict[str, Model]) -> None:
    model = models["encoder-decoder"]
    maps = model.attention(TEXT)
    (best,) = model.translate_n_best([TEXT], n=1, beam_size=1)
    assert list(maps.target_tokens or ())[1:] == best[0].tokens[:-1]
    assert model.tokenizer.tokens(maps.inputs.labels) == best[0].tokens
    assert maps.inputs.num_given == 1
    wide = model.attention(TEXT, beam_size=3, generate=4)
    (best,) = model.translate_n_best([TEXT], n=1, beam_size=3, max_length=4)
    assert model.tokenizer.tokens(wide.inputs.labels) == best[0].tokens


def test_a_decoder_reads_the_prompt_and_what_it_generates(models: dict[str, Model]) -> None:
    model = models["decoder"]
    vocabulary = model.tokenizer
    alone = model.attention(TEXT)
    assert alone.tokens == vocabulary.tokens([vocabulary.bos_id, *vocabulary.encode(TEXT)])
    assert alone.target_tokens is None and alone.stacks == ("decoder.self",)
    for beam_size in (1, 3):
        maps = model.attention(TEXT, generate=5, beam_size=beam_size)
        options = {"temperature": 0} if beam_size == 1 else {"beam_size": beam_size}
        written = model.generate(TEXT, max_new_tokens=5, **options)[0].tokens
        assert maps.tokens == [*alone.tokens, *written]
        assert maps.inputs.num_given == len(alone.tokens)
        assert vocabulary.tokens(maps.inputs.labels) == maps.tokens[1:]


def test_an_encoder_reads_blanks_as_masks(models: dict[str, Model]) -> None:
    model = models["encoder"]
    maps = model.attention("ab ___ c")
    (mask,) = model.tokenizer.tokens([model.tokenizer.mask_id])
    assert maps.tokens.count(mask) == 1 and maps.stacks == ("encoder.self",)
    assert mask not in model.attention("ab c").tokens


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("make", ["bert", "bart", "gpt2", "marian", "t5"])
def test_checkpoints_read_as_their_predictions_do(make: str, tmp_path: Path) -> None:
    """The special tokens, segments and decoder input are those with which the checkpoint predicts."""
    folder = tmp_path / "model"
    if make in ("bert", "bart"):
        build: Callable[..., Path] = fine_tuning.bart if make == "bart" else fine_tuning.encoder
        kind = {"bert": "BertForSequenceClassification", "bart": "BartForSequenceClassification"}[make]
        model = ch.load(build(folder, kind), device="cpu")
        with capture(model.module, "**.weights") as seen:
            model.classify([("the cat sat", "a small dog")])
        maps = model.attention(("the cat sat", "a small dog"))
    elif make == "gpt2":
        model = ch.load(hf_models.language_model(folder), device="cpu")
        with capture(model.module, "**.weights") as seen:
            model.score("the cat sat")
        # A score begins with the token that ends the text before, a prompt does not.
        maps = model.attention("the cat sat")
        assert maps.tokens[0] != "<|endoftext|>"
        chat = model.attention("the cat sat", chat=True)
        assert chat.tokens == [*maps.tokens, "<|endoftext|>"]
        return
    else:
        model = ch.load(fine_tuning.t5(folder) if make == "t5" else hf_models.translator(folder), device="cpu")
        with capture(model.module, "**.weights") as seen:
            model.score("the cat sat", "a small dog")
        maps = model.attention("the cat sat", "a small dog")
    for (stack, layer), record in maps.records.items():
        assert torch.equal(maps.weights(stack, layer), seen.tensor(f"{record.address}.weights")[0])


def test_numbers_do_not_depend_on_the_precision_of_the_machine(models: dict[str, Model]) -> None:
    model = models["decoder"]
    rounded = model.with_module(ch.build(model.spec).bfloat16())
    exact = model.with_module(ch.build(model.spec))
    exact.module.load_state_dict(rounded.module.state_dict())
    weights = rounded.attention(TEXT).weights("decoder.self", 1)
    assert torch.equal(weights, exact.attention(TEXT).weights("decoder.self", 1))
    assert next(rounded.module.parameters()).dtype == torch.bfloat16
    as_loaded = rounded.attention(TEXT, precision="auto").weights("decoder.self", 1)
    assert as_loaded.dtype == torch.float32 and not torch.equal(as_loaded, weights)


def test_files_hold_the_weights(pair_maps: AttentionMaps, tmp_path: Path) -> None:
    path = tmp_path / "new" / "maps.npz"
    pair_maps.save(path)
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["tokens"].tolist() == pair_maps.tokens
        assert arrays["target_tokens"].tolist() == pair_maps.target_tokens
        for stack in pair_maps.stacks:
            assert arrays[stack].dtype == np.float32 and arrays[f"{stack}.layers"].tolist() == [0, 1, 2]
            for layer in range(LAYERS):
                assert np.array_equal(arrays[stack][layer], pair_maps.weights(stack, layer).numpy())
    pair_maps.save(path, layers=[2, 0], heads=[1], force=True)
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["decoder.self.layers"].tolist() == [0, 2] and arrays["decoder.self.heads"].tolist() == [1]
        weights = arrays["decoder.memory"]
        assert weights.shape[:2] == (2, 1)
        np.testing.assert_allclose(weights[1, 0], pair_maps.weights("decoder.memory", 2, 1), atol=1e-6)
    content = json.loads(json.dumps(pair_maps.to_json(layers=[1])))
    assert content["tokens"] == pair_maps.tokens and len(content["attention"]) == 3 * HEADS
    for head in content["attention"]:
        expected = pair_maps.weights(head["stack"], head["layer"], head["head"])
        torch.testing.assert_close(torch.tensor(head["weights"]), expected, atol=1e-6, rtol=0)


def test_no_file_is_replaced_unless_told(pair_maps: AttentionMaps, tmp_path: Path) -> None:
    writing: dict[str, Callable[..., None]] = {
        "maps.npz": pair_maps.save,
        "heads.html": pair_maps.save_html,
        "heads.svg": partial(pair_maps.save_picture, view="overview"),
    }
    for name, write in writing.items():
        file = tmp_path / name
        file.write_text("mine")
        with pytest.raises(
            InputError, match=rf"{name} exists already: name another file, or replace it with force=True"
        ):
            write(file)
        assert file.read_text() == "mine"
        write(file, force=True)
        assert file.stat().st_size > 1000


def test_a_layer_that_lost_a_head_has_no_numbers_there(models: dict[str, Model], tmp_path: Path) -> None:
    edited = ch.surgery.remove_heads(models["decoder"], {"decoder.layers.1": [1]})
    maps = edited.model.attention(TEXT)
    assert [maps.num_heads("decoder.self", layer) for layer in range(LAYERS)] == [2, 1, 2]
    maps.save(tmp_path / "maps.npz")
    with np.load(tmp_path / "maps.npz") as arrays:
        assert np.isnan(arrays["decoder.self"][1, 1]).all()
        assert not np.isnan(arrays["decoder.self"][[0, 2]]).any()


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("decoder", {"text": "  "}, "the text is empty"),
        ("decoder", {"text": TEXT, "target": TARGET}, "leave the target out"),
        ("encoder", {"text": TEXT, "target": TARGET}, "has no decoder to read a target: leave the target out"),
        ("encoder", {"text": TEXT, "generate": 3}, "generates no text: leave generate out"),
        ("encoder", {"text": (TEXT, TARGET)}, "got a pair"),
        ("decoder", {"text": (TEXT, TARGET)}, "got a pair"),
        ("decoder", {"text": TEXT, "beam_size": 2}, "nothing is generated"),
        ("decoder", {"text": TEXT, "generate": -1}, "generate must be at least 0"),
        ("decoder", {"text": TEXT, "chat": True}, "no chat template"),
        ("decoder", {"text": "a b " * 40_000}, "tokens, but at most 131,072 are read at once"),
        ("decoder", {"text": TEXT, "precision": "fp8"}, "precision must be auto, fp32 or bf16"),
        ("decoder", {"text": TEXT, "layers": 3}, "there is no option 'layers'"),
        ("encoder-decoder", {"text": TEXT, "target": TARGET, "generate": 2}, "leave target or generate out"),
        ("encoder-decoder", {"text": TEXT, "target": " "}, "the target is empty"),
        ("encoder-decoder", {"text": TEXT, "from_language": "de"}, "leave the languages out"),
        ("reader", {"text": TEXT}, "give a pair of a question and a text with the answer"),
        ("reader", {"text": (TEXT, TEXT, TARGET)}, "expected a text or a tuple of 2"),
    ],
)
def test_bad_input_is_one_sentence(
    models: dict[str, Model], family: str, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        models[family].attention(**arguments)
    assert "\n" not in str(error.value)


def test_a_text_longer_than_the_model(tmp_path: Path) -> None:
    model = ch.load(hf_models.language_model(tmp_path), device="cpu")
    with pytest.raises(InputError, match="but the model has 61 positions"):
        model.attention("the cat sat on the mat " * 10)
    full = model.attention("the cat sat", generate=100)
    assert len(full.tokens) <= 61


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("decoder.selff", 0),
            r"this model has no stack 'decoder.selff' \(did you mean 'decoder.self'\?\); it has encoder.self",
        ),
        (("decoder.self", 3), "decoder.self has no layer 3; it has 0 to 2"),
        (("decoder.self", -1), "decoder.self has no layer -1"),
        (("decoder.self", 0, 2), "layer 0 of decoder.self has no head 2; it has 0, 1"),
    ],
)
def test_what_does_not_exist_is_named(pair_maps: AttentionMaps, arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pair_maps.weights(*arguments)


@pytest.mark.parametrize(
    ("family", "stack", "message"),
    [
        ("decoder", "encoder.self", "'encoder.self': this model has no encoder; it has decoder.self"),
        (
            "decoder",
            "decoder.memory",
            "this model has no encoder, so its decoder has no cross-attention; it has decoder.self",
        ),
        ("encoder", "decoder.self", "'decoder.self': this model has no decoder; it has encoder.self"),
        ("encoder", "decoder.memory", "'decoder.memory': this model has no decoder; it has encoder.self"),
    ],
)
def test_a_stack_of_another_kind_of_model(
    models: dict[str, Model], tmp_path: Path, family: str, stack: str, message: str
) -> None:
    """A wrong stack is reported before a missing layer and head of a picture."""
    maps = models[family].attention("a b c")
    for ask in (lambda: maps.weights(stack, 0, 0), lambda: maps.save_picture(tmp_path / "head.svg", stack=stack)):
        with pytest.raises(InputError, match=message):
            ask()


def test_files_that_cannot_be(pair_maps: AttentionMaps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="has no layer 5; it has 0 to 2"):
        pair_maps.save(tmp_path / "maps.npz", layers=[0, 5])
    with pytest.raises(InputError, match="has no head 7; it has 0, 1"):
        pair_maps.to_json(heads=[7])
    with pytest.raises(InputError, match=r"must end in \.npz"):
        pair_maps.save(tmp_path / "maps.npy")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        pair_maps.save(tmp_path / "file" / "maps.npz")
    monkeypatch.setattr("clearhead.interpret.maps.attention_run.MOST_BYTES", 4 * 6 * 7)
    with pytest.raises(InputError, match="at most 2 GiB fit: choose some with layers= and heads="):
        pair_maps.save(tmp_path / "maps.npz")
    with pytest.raises(InputError, match="at most 2 GiB fit: choose some with head= and queries="):
        pair_maps.weights("decoder.memory", 0)
    assert pair_maps.weights("decoder.memory", 0, 0).shape == (6, 7)
    assert not list(tmp_path.glob("*.npz"))


def test_pictures_of_heads(pair_maps: AttentionMaps, models: dict[str, Model], tmp_path: Path) -> None:
    pair_maps.save_picture(tmp_path / "head.svg", stack="decoder.memory", layer=1, head=0)
    models["decoder"].attention(TEXT).save_picture(tmp_path / "head.png", layer=1, head=0)
    pair_maps.save_picture(tmp_path / "all.svg", view="overview")
    pair_maps.save_picture(tmp_path / "one.svg", view="overview", stack="decoder.memory")
    images = [(tmp_path / name).read_text().count("<image ") for name in ("head.svg", "all.svg", "one.svg")]
    assert images == [2, 3 * LAYERS * HEADS + 1, LAYERS * HEADS + 1]
    for arguments, message in (
        ({"view": "lines"}, "must be matrix or overview, got 'lines'"),
        ({"stack": "decoder.self", "layer": 1}, r"give 'stack' \("),
        ({"layer": 1, "head": 1}, "encoder.self, decoder.self, decoder.memory"),
        ({"view": "overview", "head": 1}, "leave 'layer' and 'head' out"),
        ({"stack": "decoder.self", "layer": 1, "head": 9}, "has no head 9"),
    ):
        with pytest.raises(InputError, match=message):
            pair_maps.save_picture(tmp_path / "x.svg", **arguments)


def test_thumbnails_hold_the_largest_weight_of_each_part(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = models["encoder-decoder"].attention("abcde fgh" * 3, "abc" * 4)
    monkeypatch.setattr("clearhead.interpret.maps.attention_maps.THUMBNAIL", 5)
    monkeypatch.setattr("clearhead.interpret.maps.head_statistics._CHUNK", 60)
    weights = maps.weights("decoder.memory", 1)
    pictures = thumbnails(maps.record("decoder.memory", 1))
    assert pictures.shape == (HEADS, 5, 5)
    for row in range(5):
        for column in range(5):
            rows = [i for i in range(13) if i * 5 // 13 == row]
            columns = [j for j in range(28) if j * 5 // 28 == column]
            expected = weights[:, rows][:, :, columns].amax((1, 2))
            torch.testing.assert_close(pictures[:, row, column], expected, atol=1e-6, rtol=0)
