"""Runs that start from multilingual translators train on the same inputs that transformers would prepare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead as ch
from clearhead.apps.cli.lines import one_line
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.tasks.translate.train import Training, collate_pairs
from clearhead.training.assemble import train_run
from clearhead.training.init_from import find_initial_model
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from clearhead.training.task_setup import TaskSetup
from tests import hf_models as checkpoints
from tests.checkpoints.hf import tokenizer_folders
from tests.tasks.fine_tuning import write_data, write_run

PIECES = "sentencepiece.bpe.model"
SIZES: dict[str, Any] = {
    "d_model": 22, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 29, "decoder_ffn_dim": 31, "max_position_embeddings": 61, "init_std": 0.2, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
READS, WRITES = "en_XX", "de_DE"


def of_25(folder: Path) -> Path:
    """The language stands behind the text, and the decoder starts with it."""
    return mbart(folder, "MBartTokenizer", behind=27)


def of_50(folder: Path) -> Path:
    """The language stands before the text, and is the first that the decoder writes; one row has no word."""
    return mbart(folder, "MBart50Tokenizer", behind=54, decoder_start_token_id=2)


def mbart(folder: Path, tokenizer: str, behind: int, **changes: Any) -> Path:
    content = tokenizer_folders.pieces_model("unigram")
    torch.manual_seed(11)
    size = tokenizer_folders.processor(content).get_piece_size() + 1 + behind
    config = transformers.MBartConfig(vocab_size=size, **SIZES, **changes)
    checkpoints.save(transformers.MBartForConditionalGeneration(config), folder)
    return tokenizer_folders.write(folder, {PIECES: content, "tokenizer_config.json": {"tokenizer_class": tokenizer}})


def m2m(folder: Path) -> Path:
    """Codes of two letters, pieces looked up in a vocabulary."""
    content = tokenizer_folders.pieces_model("unigram")
    model = tokenizer_folders.processor(content)
    pieces = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    torch.manual_seed(12)
    config = transformers.M2M100Config(vocab_size=len(vocabulary) + 108, decoder_start_token_id=2, **SIZES)
    checkpoints.save(transformers.M2M100ForConditionalGeneration(config), folder)
    tokenizer_config = {"tokenizer_class": "M2M100Tokenizer"}
    return tokenizer_folders.write(
        folder, {PIECES: content, "vocab.json": vocabulary, "tokenizer_config.json": tokenizer_config}
    )


CASES: dict[str, tuple[Callable[[Path], Path], str, str, str]] = {
    "behind": (of_25, "MBartForConditionalGeneration", READS, WRITES),
    "before": (of_50, "MBartForConditionalGeneration", READS, WRITES),
    "codes": (m2m, "M2M100ForConditionalGeneration", "en", "de"),
}


def run_file(folder: Path, start: Path, source: str, target: str) -> Path:
    task = f'kind = "translate"\nfrom_language = "{source}"\nto_language = "{target}"'
    return write_run(folder, start, task, "pairs", steps=12)


@pytest.mark.parametrize("case", CASES)
def test_a_pair_is_read_as_its_own_library_reads_it(case: str, tmp_path: Path) -> None:
    make, written, source, target = CASES[case]
    folder = make(tmp_path / "start")
    loaded = load_run_file(run_file(tmp_path, folder, source, target), [])
    start = find_initial_model(loaded.task.init, source, target)
    assert start is not None
    setup = TaskSetup(loaded, lambda train: start.tokenizers, start, TrainingProgress(), torch.device("cpu"))
    store = Training(setup).pairs(start.tokenizers).valid
    rows = np.arange(5)
    batch = collate_pairs(store, rows, start.tokenizers)
    assert batch.mask is not None and batch.target_ids is not None and batch.target_mask is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, src_lang=source, tgt_lang=target)
    other = getattr(transformers, written).from_pretrained(folder).eval()
    texts, outputs = ((tmp_path / f"valid.{end}").read_text().splitlines() for end in ("txt", "other"))
    for row in rows:
        line = store.arrays["lines"][row]
        theirs = tokenizer(texts[line], text_target=outputs[line], return_tensors="pt")
        assert batch.ids[row, batch.mask[row]].tolist() == theirs["input_ids"][0].tolist()
        labels = theirs["labels"][0].tolist()
        if case == "behind":
            # The other library also learns that its language follows the end, which nothing asks for.
            read = [labels.pop(), *labels[:-1]]
        else:
            read = [other.config.decoder_start_token_id, *labels[:-1]]
        mask = batch.target_mask[row]
        assert batch.target_ids[row, mask].tolist() == read and batch.labels[row, mask].tolist() == labels


@pytest.mark.parametrize("case", CASES)
def test_a_run_writes_the_language_it_learned(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without naming one again; and as the family that it came from, whose users name them."""
    make, written, source, target = CASES[case]
    path = run_file(tmp_path, make(tmp_path / "start"), source, target)
    train_run(load_run_file(path, ["train.validate_every=4"]), resume=False, progress=TrainingProgress())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    assert losses[-1] < losses[0]
    run = ch.load(tmp_path / "run@last", device="cpu", precision="fp32")
    texts = ["the cat sat on the mat", "dog runs over green grass"]
    expected = run.translate_n_best(texts, n=1, beam_size=1, max_length=9)
    assert all(hypothesis.tokens for (hypothesis,) in expected)
    run.save(tmp_path / "back", format="hf")
    back = ch.load(tmp_path / "back", device="cpu", precision="fp32")
    languages = {"from_language": source, "to_language": target}
    assert back.translate_n_best(texts, n=1, beam_size=1, max_length=9, **languages) == expected
    other, loading_info = getattr(transformers, written).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", src_lang=source, tgt_lang=target)
    index = tokenizer.convert_tokens_to_ids(target) if case != "codes" else tokenizer.get_lang_id(target)
    begins = {"decoder_start_token_id": index} if case == "behind" else {"forced_bos_token_id": index}
    for text, (hypothesis,) in zip(texts, expected, strict=True):
        read = tokenizer(text, return_tensors="pt")
        options = {"max_length": 10, "do_sample": False, "forced_eos_token_id": 2}
        with torch.no_grad():
            ids = other.eval().generate(**read, **begins, **options)[0].tolist()
        # The start, and the language where that is written, are forced and no part of the text.
        assert run.tokenizers.target.tokens(ids[1:]) == hypothesis.tokens
    # A language that the run did not learn can still be asked for; one that nobody knows is refused.
    capfd.readouterr()
    (tmp_path / "in.txt").write_text("the cat\n")
    arguments = ["translate", str(tmp_path / "run@last"), str(tmp_path / "in.txt"), "--device", "cpu"]
    assert main([*arguments, "--to", target]) == 0
    assert main([*arguments, "--to", "nowhere"]) == 2
    assert "no language 'nowhere'" in capfd.readouterr().err


@pytest.mark.parametrize("case", CASES)
def test_translations_between_named_languages_are_measured(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the checkpoint's own settings, as `translate` follows them."""
    make, written, source, target = CASES[case]
    folder = make(tmp_path / "model")
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "num_beams": 2, "max_length": 7}))
    write_data(tmp_path)
    files = [str(tmp_path / name) for name in ("valid.txt", "valid.other")]
    data_options = ["--source", files[0], "--target", files[1], "--device", "cpu", "--json"]
    arguments = [
        "evaluate",
        str(folder),
        *data_options,
        "--from",
        source,
        "--to",
        target,
        "-o",
        str(tmp_path / "out.txt"),
    ]
    assert main(arguments) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    model = ch.load(folder, device="cpu", precision="fp32")
    texts, references = (Path(name).read_text().splitlines() for name in files)
    expected = model.translate(texts, from_language=source, to_language=target)
    assert (tmp_path / "out.txt").read_text().splitlines() == [one_line(text) for text in expected]
    pair_model = model.for_languages(source, target)
    assert pair_model.translate(texts) == expected
    # The loss is that of the other library, its language left out where it is only read.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, src_lang=source, tgt_lang=target)
    other = getattr(transformers, written).from_pretrained(folder).eval()
    total, count = 0.0, 0
    for text, reference in zip(texts, references, strict=True):
        read = tokenizer(text, text_target=reference, return_tensors="pt")
        labels = read["labels"]
        first = torch.tensor([[labels[0, -1]]]) if case == "behind" else torch.tensor([[2]])
        labels = labels[:, :-1] if case == "behind" else labels
        shifted = torch.cat([first, labels[:, :-1]], 1)
        with torch.no_grad():
            logits = other(read["input_ids"], decoder_input_ids=shifted).logits
        total += float(torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum"))
        count += labels.shape[1]
    assert record["loss"] == pytest.approx(total / count, rel=1e-4)
    assert main([*arguments[:-4], "--from", source]) == 2
    assert "name the target language" in capfd.readouterr().err


def test_languages_are_asked_for(tmp_path: Path) -> None:
    folder = of_50(tmp_path / "start")
    with pytest.raises(InputError, match="name the language of the text; it has: ar_AR"):
        find_initial_model(str(folder), None, WRITES)
    with pytest.raises(InputError, match="name the target language"):
        find_initial_model(str(folder), READS, None)
    with pytest.raises(InputError, match=r"no language 'de' \(did you mean 'de_DE'\?\); it has: ar_AR"):
        find_initial_model(str(folder), READS, "de")
