"""Use of a `Model`: its answers, their agreement with one another, and the references that load it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests.apps.cli.tiny_run import write_run_file

TEXTS = ["a m u", "e q y b n", "c", "zzz a"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training of six steps, with checkpoints 3 and 6."""
    folder = tmp_path_factory.mktemp("model")
    assert main(["train", str(write_run_file(folder))]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def model(run: Path) -> ch.Model:
    return ch.load(run)


@pytest.fixture
def saved(model: ch.Model, tmp_path: Path) -> Path:
    model.save(tmp_path / "saved")
    return tmp_path / "saved"


def test_empty_lines_are_answered_by_empty_lines(model: ch.Model) -> None:
    translations = model.translate(["", "a m u", "   ", "c", "\t"])
    alone = model.translate(["a m u", "c"])
    assert translations == ["", alone[0], "", alone[1], ""]
    assert model.translate([]) == []
    nothing = model.translate_n_best(["", "a m u"], n=3)
    assert len(nothing[0]) == 1 < len(nothing[1])
    assert (nothing[0][0].text, nothing[0][0].tokens, nothing[0][0].score) == ("", [], 0.0)


def test_the_best_of_many_is_the_translation(model: ch.Model) -> None:
    best = model.translate_n_best(TEXTS, n=4)
    assert [hypotheses[0].text for hypotheses in best] == model.translate(TEXTS, beam_size=5)
    for hypotheses in best:
        assert 1 < len(hypotheses) <= 4
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        assert len({tuple(h.tokens) for h in hypotheses}) == len(hypotheses)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 0.6])
def test_score_is_the_score_that_search_reports(model: ch.Model, alpha: float) -> None:
    checked = 0
    for text, hypotheses in zip(TEXTS, model.translate_n_best(TEXTS, n=3, length_penalty=alpha), strict=True):
        for hypothesis in hypotheses:
            if model.tokenizers.target.encode(hypothesis.text) != [
                model.tokenizers.target.encode(token)[0]
                for token in hypothesis.tokens
                if token not in ("</s>", "<unk>")
            ]:
                continue
            known = model.score(text, hypothesis.text, length_penalty=alpha)
            if len(known.ids) == len([t for t in hypothesis.tokens if t != "</s>"]) + 1:
                assert known.score == pytest.approx(hypothesis.score, abs=1e-4)
                assert known.log_probability == pytest.approx(hypothesis.log_probability, abs=1e-4)
                checked += 1
    assert checked >= 4
    both = model.score(TEXTS[:2], ["a b", "c"], length_penalty=alpha)
    assert both[1].score == pytest.approx(model.score(TEXTS[1], "c", length_penalty=alpha).score, abs=1e-5)


def test_batches_change_no_answer(model: ch.Model) -> None:
    assert model.translate(TEXTS, batch_size=1) == model.translate(TEXTS)
    assert model.translate(TEXTS, max_length=2) == [h[0].text for h in model.translate_n_best(TEXTS, n=1, max_length=2)]


def test_an_unknown_option_is_named(model: ch.Model) -> None:
    with pytest.raises(InputError, match=r"no option 'beam_sise' \(did you mean 'beam_size'\?\)"):
        model.translate(TEXTS, beam_sise=3)
    with pytest.raises(InputError, match=r"no option 'temprature' \(did you mean 'temperature'\?\)"):
        model.generate("a", temprature=1.0)
    with pytest.raises(InputError, match="no option 'penalty_alpha': contrastive search is not supported; trans"):
        model.generate("a", penalty_alpha=0.6, top_k=4)
    with pytest.raises(InputError, match="no option 'beam_size'"):
        model.stream("a", beam_size=3)


def test_one_text_has_one_answer(model: ch.Model) -> None:
    text, target = TEXTS[1], "a b"
    assert model.translate(text) == model.translate([text])[0] and isinstance(model.translate(text), str)
    assert model.translate_n_best(text, n=3) == model.translate_n_best([text], n=3)[0]
    assert model.generate(text, temperature=0.0) == model.generate([text], temperature=0.0)[0]
    assert model.score(text, target) == model.score([text], [target])[0]
    assert model.translate(tuple(TEXTS)) == list(model.translate(text for text in TEXTS)) == model.translate(TEXTS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "^expected a text, or a list of them, got NoneType$"),
        (5, "^expected a text, or a list of them, got int$"),
        (b"a m u", "^expected a text, or a list of them, got bytes$"),
        ({"text": "a"}, "^expected a text, or a list of them, got dict$"),
        (["a m u", None], "^text 2 is None; expected a text$"),
        ([("a", "m")], r"^text 1 is \('a', 'm'\); expected a text$"),
    ],
)
def test_what_is_no_text_is_one_sentence(value: Any, message: str, model: ch.Model) -> None:
    calls = (model.translate, model.translate_n_best, model.generate, model.score, model.fill)
    for call in (*calls, lambda texts: model.score("a", texts) if texts is not None else model.translate(texts)):
        with pytest.raises(InputError, match=message):
            call(value)


def test_references_name_checkpoints(run: Path) -> None:
    def weights(reference: str) -> torch.Tensor:
        module = ch.load(reference).module
        assert not module.training
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    best = (run / "best").read_text(encoding="utf-8").strip()
    assert torch.equal(weights(str(run)), weights(f"{run}@best"))
    assert torch.equal(weights(f"{run}@best"), weights(f"{run}@{best}"))
    assert torch.equal(weights(f"{run}@last"), weights(f"{run}@step-6"))
    assert not torch.equal(weights(f"{run}@step-3"), weights(f"{run}@step-6"))
    with pytest.raises(InputError, match="no checkpoint of step 4; existing steps: 0, 1, 2, 3, 5, 6"):
        ch.load(f"{run}@step-4")


def test_a_saved_model_has_no_checkpoints(saved: Path) -> None:
    with pytest.raises(InputError, match="is a saved model and has no checkpoint '@best'"):
        ch.load(f"{saved}@best")


def test_saving_overwrites_nothing(model: ch.Model, saved: Path) -> None:
    with pytest.raises(InputError, match="exists already; give a new folder"):
        model.save(saved)
    with pytest.raises(InputError, match="format 'onnx' is not known"):
        model.save(saved / "new", format="onnx")
    assert not (saved / "new").exists()


@pytest.mark.parametrize("missing", ["spec.json", "weights.safetensors"])
def test_a_folder_of_something_else_is_refused(saved: Path, missing: str) -> None:
    (saved / missing).unlink()
    with pytest.raises(InputError, match=f"{missing}(, or config.json as in a Hugging Face checkpoint,)? is missing"):
        ch.load(saved)


def test_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"nowhere: there is no such folder: .* has no 'nowhere'; expected a run directory, a saved model or",
    ):
        ch.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="there is no device 'cuda:9'"):
        ch.load(tmp_path, device="cuda:9")


@pytest.mark.parametrize("name", ["weights.safetensors", "spec.json", "task.json", "tokenizer.json"])
def test_a_flipped_byte_of_a_saved_model_is_named(saved: Path, name: str) -> None:
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name} was altered after it was written\. Restore the file"):
        ch.load(saved)


def test_a_file_with_holes_is_not_hashed(saved: Path) -> None:
    size = 2**42
    with (saved / "weights.safetensors").open("ab") as file:
        file.truncate(size)
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"]["weights.safetensors"]["size"] = size
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"weights\.safetensors: to load it needs about 4\.4 TB of memory"):
        ch.load(saved)


@pytest.fixture
def edited(saved: Path) -> Path:
    """Return the saved model without its manifest, so that tests may change its files."""
    (saved / "manifest.json").unlink()
    return saved


def test_weights_of_another_shape_are_all_named(edited: Path) -> None:
    saved = edited
    written = json.loads((saved / "spec.json").read_text(encoding="utf-8"))
    step = written["encoder"]["layers"]["distinct"][0]["steps"][1]
    step["branches"][0]["function"]["size"] = 23
    (saved / "spec.json").write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        ch.load(saved)
    assert "3 faults in" in str(caught.value)
    assert "function.up.weight' has the shape [22, 14], the model needs [23, 14]" in str(caught.value)


def test_a_larger_tokenizer_than_the_tables_is_refused(edited: Path) -> None:
    saved = edited
    for file in saved.glob("*tokenizer*"):
        file.unlink()
    larger = train_tokenizer("word", [" ".join(f"w{i}" for i in range(200))], vocab_size=150)
    TokenizerPair(larger, larger, True).save(saved)
    with pytest.raises(InputError, match="tokenizer has 150 entries, but the model has"):
        ch.load(saved)


def test_a_damaged_spec_is_refused_in_the_words_of_the_spec(edited: Path) -> None:
    saved = edited
    text = (saved / "spec.json").read_text(encoding="utf-8")
    (saved / "spec.json").write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(InputError, match="the spec is not JSON"):
        ch.load(saved)


def test_precision_and_device_are_chosen_at_the_door(saved: Path) -> None:
    half = ch.load(saved, device="cpu", precision="bf16")
    assert {parameter.dtype for parameter in half.module.parameters()} == {torch.bfloat16}
    assert len(half.translate(["a m u"])) == 1
    assert {parameter.dtype for parameter in ch.load(saved).module.parameters()} == {torch.float32}
    with pytest.raises(InputError, match="precision must be one of auto, fp32, bf16, int8, int4; got 'int3'"):
        ch.load(saved, precision="int3")


def test_a_single_stack_does_not_translate() -> None:
    words = train_tokenizer("word", ["a b c"], vocab_size=9)
    hparams = Hyperparameters(family="decoder", layers=1, width=14, heads=2)
    module = ch.build(build_spec(hparams, source_vocab=9, target_vocab=9)).eval()
    model = ch.Model(module, TokenizerPair(words, words, True), TaskRecord(kind="generate"))
    with pytest.raises(InputError, match="needs a model with encoder and decoder, but this model has a single stack"):
        model.translate(["a"])
    with pytest.raises(InputError, match="needs a model with encoder and decoder"):
        model.score("a", "b")


def test_a_copied_run_still_loads(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "elsewhere")
    assert ch.load(tmp_path / "elsewhere").translate(TEXTS) == ch.load(run).translate(TEXTS)
