"""Models loaded from checkpoint folders generate the text of transformers and follow the settings in their files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests import hf_models
from tests.checkpoints.hf.tokenizer_folders import SENTENCES

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

SETTINGS = {
    "eos_token_id": [0, 17],
    "bos_token_id": 0,
    "pad_token_id": 0,
    "max_length": 23,
    "suppress_tokens": [3, 4, 5],
    "begin_suppress_tokens": [90, 91],
    "bad_words_ids": [[80], [81, 82]],
    "repetition_penalty": 1.3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.language_model(tmp_path_factory.mktemp("lm") / "model", SETTINGS)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.translator(tmp_path_factory.mktemp("mt") / "model")


def test_a_real_checkpoint_writes_what_its_author_published(data_dir: Path) -> None:
    story = data_dir / "stories260K"
    model = ch.load(story, device="cpu", precision="fp32")
    (generation,) = model.generate("", max_new_tokens=256, temperature=0)
    assert generation.text + "\n" == (story / "expected.txt").read_text("utf-8")
    assert generation.stop_reason == "length"


@pytest.mark.parametrize("beams", [1, 3])
def test_text_is_what_the_other_library_generates(folder: Path, beams: int) -> None:
    model = ch.load(folder, device="cpu", precision="fp32")
    other = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    for prompt in ("the cat", "a small dog runs"):
        ids = model.tokenizer.encode(prompt)
        with torch.no_grad():
            theirs = other.generate(torch.tensor([ids]), num_beams=beams, early_stopping="never", length_penalty=1.0)
        (ours,) = model.generate(prompt, beam_size=beams) if beams > 1 else model.generate(prompt, temperature=0)
        assert ours.tokens == model.tokenizer.tokens(theirs[0, len(ids) :].tolist())
        assert beams > 1 or len(ids) + len(ours.tokens) == 23 or ours.stop_reason == "end"


def test_what_is_given_wins_over_the_files(folder: Path) -> None:
    model = ch.load(folder, device="cpu", precision="fp32")
    (longer,) = model.generate("the cat", max_new_tokens=31)
    assert len(longer.tokens) == 31 or longer.stop_reason == "end"
    assert model.generate("") and model.generate("hi", chat=True)
    assert "".join(model.stream("the cat", seed=3)) == model.generate("the cat", seed=3)[0].text
    (folder / "generation_config.json").rename(folder / "aside.json")
    try:
        assert ch.load(folder, device="cpu").hf_checkpoint.generation_config.banned_ids == ()
    finally:
        (folder / "aside.json").rename(folder / "generation_config.json")


def test_translations_are_those_of_the_other_library(translator: Path) -> None:
    model = ch.load(translator, device="cpu", precision="fp32")
    tokenizer = transformers.MarianTokenizer.from_pretrained(translator)
    other = transformers.MarianMTModel.from_pretrained(translator).eval()
    texts = ["the cat sat on the mat", "ein kleiner Hund"]
    with torch.no_grad():
        theirs = [
            other.generate(**tokenizer([text], return_tensors="pt"), max_length=13, num_beams=1)[0].tolist()
            for text in texts
        ]
    ours = model.translate_n_best(texts, n=1, beam_size=1, max_length=12)
    for (hypothesis,), ids in zip(ours, theirs, strict=True):
        assert hypothesis.tokens == model.tokenizers.target.tokens(ids[1:])
        assert hypothesis.text == tokenizer.decode(ids, skip_special_tokens=True)
    with pytest.raises(InputError, match="no language codes, so 'de' has no effect"):
        model.translate(texts, from_language="de")


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1, "max_length": 13},
        {"min_length": 9, "max_length": 11},
        {"min_new_tokens": 6, "max_new_tokens": 7, "max_length": 400},
    ],
    ids=["no repetition", "lengths", "new tokens"],
)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_translation_follows_the_settings_too(settings: dict[str, float], beams: int, tmp_path: Path) -> None:
    """Guard against translations and summaries that ignore the generation settings."""
    folder = hf_models.translator(tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings, "num_beams": beams}))
    model = ch.load(folder, device="cpu", precision="fp32")
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    other = transformers.MarianMTModel.from_pretrained(folder).eval()
    text = "the cat sat on the mat"
    with torch.no_grad():
        theirs = other.generate(**tokenizer([text], return_tensors="pt"), early_stopping="never")[0].tolist()
    ((hypothesis,),) = model.translate_n_best([text], n=1)
    assert hypothesis.tokens == model.tokenizers.target.tokens(theirs[1:])
    assert hypothesis.text != model.translate_n_best([text], n=1, beam_size=beams, max_length=3)[0][0].text


def test_saved_for_others_it_is_the_same(folder: Path, translator: Path, tmp_path: Path) -> None:
    for source, kind in ((folder, transformers.GPT2LMHeadModel), (translator, transformers.MarianMTModel)):
        out = tmp_path / kind.__name__
        ch.load(source, device="cpu", precision="fp32").save(out, format="hf")
        names = {path.name for path in source.iterdir()} - {"model.safetensors", "config.json"}
        assert all((out / name).read_bytes() == (source / name).read_bytes() for name in names)
        before, after = kind.from_pretrained(source).state_dict(), kind.from_pretrained(out).state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_saved_in_our_own_layout_it_is_the_same_and_goes_back(folder: Path, translator: Path, tmp_path: Path) -> None:
    """Check tokenizers, generation settings, languages and unused tensors, and that the family stays the same."""
    for source in (folder, translator):
        came = ch.load(source, device="cpu", precision="fp32")
        came.save(tmp_path / source.parent.name / "own")
        reloaded = ch.load(tmp_path / source.parent.name / "own", device="cpu", precision="fp32")
        assert reloaded.tokenizers.fingerprint == came.tokenizers.fingerprint
        assert (
            reloaded.hf_checkpoint is not None
            and came.hf_checkpoint is not None
            and reloaded.hf_checkpoint.generation_config == came.hf_checkpoint.generation_config
        )
        if reloaded.spec.encoder is None:
            for options in ({"chat": True, "seed": 3}, {"temperature": 0}):
                assert reloaded.generate("the cat", **options)[0].text == came.generate("the cat", **options)[0].text
        else:
            assert reloaded.translate(["the cat"]) == came.translate(["the cat"])
        reloaded.save(tmp_path / source.parent.name / "back", format="hf")
        for name in {path.name for path in source.iterdir()} - {"model.safetensors", "config.json"}:
            assert (tmp_path / source.parent.name / "back" / name).read_bytes() == (source / name).read_bytes()
        configs = [
            json.loads((checkpoint / "config.json").read_text())
            for checkpoint in (source, tmp_path / source.parent.name / "back")
        ]
        assert configs[0] == configs[1]
        back = ch.load(tmp_path / source.parent.name / "back", device="cpu", precision="fp32")
        pairs = zip(back.module.state_dict().values(), came.module.state_dict().values(), strict=True)
        assert all(torch.equal(first, other) for first, other in pairs)
    saved = tmp_path / folder.parent.name / "own"
    (saved / "origin").rename(tmp_path / "elsewhere")
    (saved / "origin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="origin: a link out of the folder is not followed"):
        ch.load(saved, device="cpu", precision="fp32")


def test_a_model_trained_here_is_read_by_others_as_it_is_here(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("byte-bpe", SENTENCES, vocab_size=307)
    hparams = Hyperparameters(
        family="decoder", layers=2, width=26, heads=2, feedforward=104, activation="gelu_tanh", norm_place="pre",
        positions="learned", max_positions=61, embedding_scale=1.0,
    )  # fmt: skip
    size = tokenizer.vocab_size
    module = ch.build(build_spec(hparams, source_vocab=size, target_vocab=size)).eval()
    pair = TokenizerPair(tokenizer, tokenizer, joint=True)
    model = ch.Model(module, pair, TaskRecord(kind="generate"))
    model.save(tmp_path / "out", format="hf")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the cat", "", "a <s> b", "naïve 😀"):
        # What a user types is text here and may be a special token there.
        assert text == "a <s> b" or other(text)["input_ids"] == [tokenizer.bos_id, *tokenizer.encode(text)]
    again = ch.load(tmp_path / "out", device="cpu")
    actual, expected = (
        candidate.generate("the cat", max_new_tokens=19, temperature=0)[0] for candidate in (again, model)
    )
    assert actual.text == expected.text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([other("the cat")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, module(ids).logits, rtol=0, atol=1e-5)


def test_a_cache_of_the_hub_answers_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    revision = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "models--someone--stories"
    (home / "refs").mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "refs" / "main").write_text(revision)
    (home / "refs" / "v2").write_text(revision)
    snapshot = home / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copyfile(path, home / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    for reference in ("someone/stories", "someone/stories@v2"):
        assert ch.load(reference, device="cpu").hf_checkpoint.folder == snapshot
    for reference in ("someone/other", "someone/stories@v3"):
        message = (
            rf"^{reference}: there is no such folder: .*; and the Hugging Face hub is switched off by HF_HUB_OFFLINE"
        )
        with pytest.raises(InputError, match=message):
            ch.load(reference)
    shutil.copytree(home, tmp_path / "models--stories", symlinks=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    command = ["generate", "stories", "--prompt", "the cat", "--max-new-tokens", "3", "--temperature", "0"]
    assert main(command) == 0
    of_hub = capfd.readouterr()
    line = "stories: the checkpoint of that name on the Hugging Face hub, commit 0123456789ab"
    assert of_hub.err.splitlines().count(line) == 1, "one line says that a name without an owner was taken from the hub"
    with pytest.raises(InputError, match=r"storeis: .* \(did you mean '(someone/)?stories'\?\)"):
        ch.load("storeis")
    shutil.copytree(folder, "stories")
    assert ch.load("stories", device="cpu").hf_checkpoint.folder == Path("stories"), "a folder comes first"
    assert main(command) == 0
    here = capfd.readouterr()
    assert here.out == of_hub.out and "hub" not in here.err


def test_it_is_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json"]) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert record["task"]["kind"] == "generate"
    assert "generation  ends with 0, 17" in record["generation"]
    assert any(line.startswith("tokenizer   ") for line in record["generation"])
    assert main(["generate", str(folder), "--prompt", "the cat", "--chat", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["prompt"] == "the cat"


@pytest.mark.parametrize(
    "case",
    ["no tokenizer", "unknown model", "tokenizer too large", "settings of another kind", "unsupported", "removed"],
)
def test_a_checkpoint_that_does_not_fit_is_one_sentence(folder: Path, tmp_path: Path, case: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    message = "has no tokenizer: expected tokenizer.json"
    if case == "no tokenizer":
        (copy / "merges.txt").unlink()
    elif case == "unknown model":
        (copy / "merges.txt").unlink()
        (copy / "config.json").write_text('{"model_type": "fancynet"}')
        message = r"config\.json: model_type 'fancynet' is not known"
    elif case == "tokenizer too large":
        config = json.loads((copy / "tokenizer_config.json").read_text())
        rows = json.loads((copy / "config.json").read_text())["vocab_size"]
        config["added_tokens_decoder"] = {str(rows): {"content": "<new>"}}
        (copy / "tokenizer_config.json").write_text(json.dumps(config))
        message = rf"tokenizer has {rows + 1} entries, but the model has {rows} rows"
    elif case == "settings of another kind":
        (copy / "generation_config.json").write_text('{"eos_token_id": "x"}')
        message = "generation_config.json: eos_token_id: expected"
    elif case == "unsupported":
        (copy / "generation_config.json").write_text('{"typical_p": 0.3}')
        message = "ask for typical_p, which is not supported"
    else:
        (copy / "generation_config.json").write_text('{"penalty_alpha": 0.6, "top_k": 4}')
        message = "ask for penalty_alpha, which is not supported: contrastive search is not supported; trans"
    with pytest.raises(InputError, match=message):
        ch.load(copy, device="cpu").generate("a")
