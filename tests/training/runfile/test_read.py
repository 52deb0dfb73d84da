"""Laws of the run file: it reads back what it writes, and every fault is named in one report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.registry import BUILT_IN
from clearhead.training.runfile.model_table import least_parameters
from clearhead.training.runfile.read import find_lines, load_run_file, parse_run_file, to_toml
from clearhead.training.runfile.sections import TABLES, sections_of

TABLES_OF_TASKS = [(kind, table) for kind in BUILT_IN[1:] for table in ("task", "data")]
MINIMAL = """\
[task]
kind = "translate"
[data]
train = { source = "train.de", target = "train.en" }
valid = { source = "val.de", target = "val.en" }
[tokenizer]
kind = "bpe"
[train]
run = "runs/x"
steps = 700
"""


def report(text: str, *overrides: str) -> str:
    """Return the report that a faulty run file ends in."""
    with pytest.raises(InputError) as caught:
        parse_run_file(text, "x.toml", overrides)
    return str(caught.value)


def with_keys(table: str, *lines: str) -> str:
    """Return the minimal run file with lines added to one table."""
    if f"[{table}]\n" not in MINIMAL:
        return MINIMAL + f"[{table}]\n" + "\n".join(lines) + "\n"
    return MINIMAL.replace(f"[{table}]\n", f"[{table}]\n" + "".join(f"{line}\n" for line in lines))


def without(key: str) -> str:
    return "".join(line + "\n" for line in MINIMAL.splitlines() if not line.startswith(f"{key} ="))


# Reading and writing


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL,
        with_keys("model", "layers = 2", "gated = true", "width = 34", "heads = 17"),
        with_keys("train", "betas = [0.9, 0.95]", 'early_stop = { metric = "bleu", patience = 3 }', "ema = 0.999"),
        MINIMAL.replace(
            'source = "val.de", target = "val.en"', 'tsv = "v.tsv.gz", source_column = "de", target_column = "en"'
        ),
        MINIMAL.replace('source = "val.de", target = "val.en"', 'jsonl = "v.jsonl", source_field = "a b"'),
        MINIMAL.replace('source = "val.de", target = "val.en"', 'dataset = "x/y", config = "de-en", split = "test"'),
    ],
)
def test_resolved_file_reads_back_equal(text: str) -> None:
    run = parse_run_file(text, "x.toml")
    assert parse_run_file(to_toml(run), "resolved.toml") == run


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_round_trip(name: str) -> None:
    run = parse_run_file(MINIMAL, "x.toml")
    if not name or re.search("[\ud800-\udfff]", name):
        return
    renamed = run.model_copy(update={"train": run.train.model_copy(update={"run": name})})
    assert parse_run_file(to_toml(renamed), "resolved.toml").train.run == name


def test_resolved_file_hides_no_choice() -> None:
    resolved = to_toml(parse_run_file(MINIMAL, "x.toml"))
    for key in (
        "vocab_size",
        "joint",
        "learning_rate",
        "warmup",
        "validate_every",
        "bleu_sentences",
        "seed",
        "keep",
        "snapshots",
    ):
        assert re.search(rf"^{key} = ", resolved, re.MULTILINE), key


def test_filling_defaults_keeps_what_was_given() -> None:
    run = parse_run_file(with_keys("train", "learning_rate = 0.25", "warmup = 13"), "x.toml")
    assert (run.train.learning_rate, run.train.warmup) == (0.25, 13)


def test_whole_number_is_a_number() -> None:
    assert parse_run_file(with_keys("train", "clip = 1"), "x.toml").train.clip == 1.0


# Overrides


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.steps=900", "train", "steps", 900),
        ("train.clip=0.5", "train", "clip", 0.5),
        ("train.run=runs/other one", "train", "run", "runs/other one"),
        ('train.run="runs/quoted"', "train", "run", "runs/quoted"),
        ("train.run=a\nb = 1", "train", "run", "a\nb = 1"),
        ("model.gated=true", "model", "gated", True),
        ("train.betas=[0.8, 0.9]", "train", "betas", (0.8, 0.9)),
        ("tokenizer.joint=false", "tokenizer", "joint", False),
    ],
)
def test_override_is_read_as_toml_and_a_bare_word_as_text(override: str, section: str, key: str, value: object) -> None:
    run = parse_run_file(MINIMAL, "x.toml", [override])
    assert getattr(getattr(run, section), key) == value


def test_override_reaches_into_inline_tables() -> None:
    run = parse_run_file(MINIMAL, "x.toml", ["train.early_stop.patience=3", "data.train.source=other.de"])
    assert run.train.early_stop is not None and run.train.early_stop.patience == 3
    assert run.data.train.model_dump() == {"source": "other.de", "target": "train.en"}


def test_override_of_the_length_replaces_the_length_of_the_file() -> None:
    run = parse_run_file(MINIMAL, "x.toml", ["train.epochs=3"])
    assert (run.train.steps, run.train.epochs) == (None, 3)


def test_seconds_beside_steps_end_them_early_and_leave_schedule_and_shares_their_meaning() -> None:
    text = with_keys("train", 'schedule = "cosine"', "warmup = 0.1", "validate_every = 0.1")
    run = parse_run_file(text, "x.toml", ["train.seconds=60"])
    assert (run.train.steps, run.train.seconds) == (700, 60)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=3", "did you mean train.steps?"),
        ("nonsense=3", "the key needs the name of its table"),
        ("train.steps", "expected table.key=value"),
        ("trian.steps=3", "did you mean 'train'?"),
        ("train.stepz=3", "did you mean 'steps'?"),
        ("train.lr=3", "unknown key 'lr' in [train] (did you mean 'learning_rate'?)"),
        ("train.betas=[0.9", "not valid TOML"),
        ("train.steps=many", "must be a whole number, received the text 'many'"),
        ("train.steps.more=1", "'train.steps' is not a table"),
    ],
)
def test_faulty_override_is_quoted(override: str, expected: str) -> None:
    text = report(MINIMAL, override)
    assert expected in text and f"override '{override}'" in text


# Faults


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        (with_keys("model", "widht = 64"), 12, "unknown key 'widht' in [model] (did you mean 'width'?)"),
        (with_keys("task", "steps = 3"), 2, "unknown key 'steps' in [task] (it belongs in [train])"),
        (
            with_keys("modle", "width = 64"),
            11,
            "no table or key 'modle' at the top of a run file (did you mean 'model'?)",
        ),
        (MINIMAL.replace("source =", "sorce =", 1), 4, "unknown key 'sorce' in [data] train (did you mean 'source'?)"),
        (MINIMAL.replace('source = "train.de", target = "train.en"', 'tzv = "t"'), 4, "tzv (did you mean 'tsv'?)"),
        (MINIMAL.replace('source = "train.de"', 'tsv = "t", taget_column = 1', 1), 4, "did you mean 'target_column'?"),
        (with_keys("train", "early_stop = { metrik = 'loss' }"), 9, "did you mean 'metric'?"),
        (with_keys("train", "keep = 'all'"), 9, "[train] keep must be a whole number, received the text 'all'"),
        (with_keys("train", "keep = 1.5"), 9, "must be a whole number, received the number 1.5"),
        (with_keys("train", "keep = true"), 9, "must be a whole number, received true"),
        (with_keys("train", "clip = nan"), 9, "must be a finite number"),
        (with_keys("train", "clip = [1]"), 9, "must be a number, received a list"),
        (with_keys("train", "betas = [0.9]"), 9, "[train] betas must be a list of 2 numbers"),
        (with_keys("train", "optimizer = 'adma'"), 9, "must be one of adam, adamw, muon, received the text 'adma'"),
        (with_keys("train", "learning_rate = 0.0"), 9, "learning_rate must be above 0, received the number 0.0"),
        (with_keys("train", "learning_rate = inf"), 9, "learning_rate must be a finite number"),
        (with_keys("train", "weight_decay = -0.1"), 9, "weight_decay must be at least 0"),
        (with_keys("train", "betas = [0.9, 1.0]"), 9, "each at least 0 and below 1"),
        (with_keys("train", "eps = 0"), 9, "eps must be above 0"),
        (with_keys("train", "warmup = -1"), 9, "warmup must be a number of steps from 0 on, or a share of all steps"),
        (with_keys("train", "warmup = 1.5"), 9, "or a share of all steps such as 0.1, received the number 1.5"),
        (with_keys("train", "validate_every = 0"), 9, "validate_every must be a number of steps from 1 on, or a share"),
        (
            MINIMAL.replace("steps = 700", "seconds = 60\nvalidate_every = 0.1"),
            11,
            "validate_every = 0.1 is a share of all steps, which 'seconds' alone leaves open",
        ),
        (with_keys("train", "schedule = 'cosin'"), 9, "did you mean 'cosine'?"),
        (with_keys("train", "ema = 1.0"), 9, "ema must be below 1"),
        (with_keys("train", "accumulate = 0"), 9, "accumulate must be at least 1"),
        (with_keys("train", "early_stop = { patience = 0 }"), 9, "patience must be at least 1"),
        (with_keys("train", "label_smoothing = 1.0"), 9, "must be below 1, received the number 1.0"),
        (
            with_keys("train", "label_smoothing = 0.1").replace('"translate"', '"embed"'),
            9,
            "[train] label_smoothing has no effect for the task 'embed'; remove it",
        ),
        (with_keys("data", "max_length = 1"), 4, "must be at least 2, received the number 1"),
        ("task = 3\n" + MINIMAL.replace('[task]\nkind = "translate"\n', ""), 1, "[task] must be a table"),
        (with_keys("model", "width = 130", "heads = 4"), 13, "heads must divide the width: 130 is not a multiple of 4"),
        (with_keys("model", "heads = 6", "kv_heads = 4"), 13, "kv_heads must divide the heads"),
        (with_keys("model", "layers = 99999999"), 12, "layers must be at most 1024, received the number 99999999"),
        (with_keys("model", "width = 1000000"), 11, "width 1,000,000 have at least 72,049,152,000,000 parameters"),
        (with_keys("train", "threads = 100000"), 9, "threads = 100000 is far more than the"),
        (with_keys("model", "max_positions = 64"), 12, "less than [data] max_length = 128"),
        (with_keys("model", 'spec = "s.json"', "layers = 2"), 13, "layers has no effect with 'spec'"),
        (
            with_keys("model", "layers = 2", "encoder_layers = 2", "decoder_layers = 3"),
            12,
            "no effect with 'encoder_layers'",
        ),
        (with_keys("model", 'family = "decoder"'), 12, "must be 'encoder-decoder' for the task 'translate'"),
        (with_keys("model", 'tie = "all"') + "[tokenizer2]", 12, "needs [tokenizer] joint = true"),
        (with_keys("tokenizer", 'path = "t.json"'), 8, "kind has no effect with 'path'; remove it"),
        (with_keys("tokenizer", 'path = "t.json"', "vocab_size = 9"), 9, "kind and vocab_size have no effect with"),
        (MINIMAL.replace('"bpe"', '"byte"\nvocab_size = 300'), 8, "has no effect for kind 'byte'"),
        (with_keys("train", "epochs = 3"), 9, "epochs conflicts with 'steps'"),
        (MINIMAL.replace("steps = 700", "epochs = 3\nplanned_minutes = 5.0"), 11, "has no effect without 'steps'"),
        (with_keys("train", "snapshots = 0", "snapshot_megabytes = 7"), 10, "no effect with 'snapshots' = 0"),
        (with_keys("train", "snapshots = -1"), 9, "snapshots must be at least 0"),
        (with_keys("train", "warmup = 700", 'schedule = "wsd"'), 9, "warmup = 700 must be less than the 700 steps"),
        (with_keys("train", 'schedule = "paper"', "warmup = 0"), 10, "must be at least 1 for the schedule 'paper'"),
        (
            MINIMAL.replace("steps = 700", 'seconds = 60\nschedule = "cosine"'),
            11,
            "needs 'steps' or 'epochs', not only 'seconds'",
        ),
        (
            with_keys("train", "bleu_sentences = 0", "early_stop = { metric = 'bleu' }"),
            9,
            "conflicts with early_stop metric 'bleu'",
        ),
        (
            MINIMAL.replace('source = "val.de", target = "val.en"', 'tsv = "v", source_column = -1'),
            5,
            "source_column must be a column by its number, counted from 1, or by its name, received the number -1",
        ),
        (with_keys("train", 'device = "tpu"'), 9, "must be one of auto, cpu, cuda, mps or cuda:N"),
        (MINIMAL.replace('"translate"', '"translat"'), 2, "did you mean 'translate'?"),
        (
            with_keys("data", "pack = false"),
            4,
            "has no effect for the task 'translate', only for 'generate'; remove it",
        ),
        (with_keys("data", "stream = true"), 4, "has no effect for the task 'translate', only for 'generate'"),
        (MINIMAL.replace("source =", 'tsv = "t", source =', 1), 4, "received the keys tsv, source, target"),
        (
            MINIMAL.replace('{ source = "val.de", target = "val.en" }', "1.5"),
            5,
            "must be below 1, received the number 1.5",
        ),
        (with_keys("task", "mask_share = 0.2"), 2, "has no effect for the task 'translate', only for 'fill'"),
        (with_keys("model", 'family = "decoder"'), 12, "must be 'encoder-decoder' for the task 'translate'"),
    ],
)
def test_fault_is_named_with_its_line(text: str, line: int, expected: str) -> None:
    if "[tokenizer2]" in text:
        text = text.replace("[tokenizer2]", "").replace('kind = "bpe"', 'kind = "bpe"\njoint = false')
        line += 1
    message = report(text)
    assert any(expected in line_text and f"x.toml:{line}:" in line_text for line_text in message.splitlines()), message


CLASSIFY = """\
[task]
kind = "classify"
labels = "single_label"
[data]
train = { text = "train.tsv", labels = "label" }
valid = 0.1
[tokenizer]
kind = "bpe"
[model]
family = "encoder"
[train]
steps = 700
run = "runs/x"
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", ""),
        ('"classify"', '"clasify"', "x.toml:2: [task] kind must be one of translate, generate"),
        ('kind = "classify"', 'knd = "classify"', "x.toml:2: unknown key 'knd' in [task] (did you mean 'kind'?)"),
        ("[task]", "[tsk]", "x.toml:1: there is no table or key 'tsk' at the top of a run file (did you mean 'task'?)"),
        ('labels = "label"', 'lables = "label"', "x.toml:5: unknown key 'lables' in [data] train"),
        ('labels = "label"', "labels = [1]", "x.toml:5: [data] train.labels must be"),
        ("valid = 0.1", "valid = 1.5", "x.toml:6: [data] valid"),
    ],
)
def test_the_first_cause_is_reported_alone(before: str, after: str, expected: str) -> None:
    """What follows from a fault, such as what another task would lack, is not a fault of the file."""
    text = CLASSIFY.replace(before, after)
    if not expected:
        assert parse_run_file(text, "x.toml").task.kind == "classify"
        return
    message = report(text)
    assert message.startswith(expected) and "\n" not in message, message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (without("run"), "[train] needs the key 'run'"),
        (without("train"), "[data] needs the key 'train'"),
        (without("valid"), "[data] needs the key 'valid'"),
        (without("steps"), "must say how long to train: steps, epochs or seconds"),
        (without("kind").replace("[task]", '[task]\nkind = "translate"'), "[tokenizer] needs 'kind'"),
        ("", "the table [task] is missing"),
    ],
)
def test_missing_key_is_named(text: str, expected: str) -> None:
    assert expected in report(text)


def test_an_unknown_task_hides_no_unknown_key() -> None:
    message = report(
        CLASSIFY.replace('"classify"', '"clasify"\nlabl = 1').replace("valid = 0.1", "valid = 0.1\npak = 1")
    )
    assert message.startswith("3 faults in x.toml:") and "'labl'" in message and "'pak'" in message


def test_one_report_lists_every_fault_and_no_fault_hides_another() -> None:
    text = with_keys("model", "widht = 64", "width = 130", "heads = 4", "dropout = 1.5").replace(
        "steps = 700", 'steps = "many"'
    )
    message = report(text, "train.keep=none")
    assert message.startswith("5 faults in x.toml:")
    for expected in (
        "'widht'",
        "not a multiple of 4",
        "dropout must be below 1",
        "steps must be a whole number",
        "override 'train.keep=none'",
    ):
        assert expected in message


def test_faulty_key_causes_no_second_fault() -> None:
    assert "faults" not in report(MINIMAL.replace("steps = 700", 'steps = "many"'))
    assert "faults" not in report(MINIMAL.replace('kind = "bpe"', 'kind = "bpee"'))
    assert "faults" not in report(
        with_keys("train", "early_stop = { patience = 2 }").replace("valid = {", "valid = { x = 1, ")
    )


@pytest.mark.parametrize(("kind", "section"), [("translate", table) for table in TABLES] + TABLES_OF_TASKS)
def test_a_fault_in_any_key_is_reported_in_our_words(kind: str, section: str) -> None:
    for key in sections_of(kind)[section].model_fields:
        message = report(MINIMAL, f"task.kind={kind}", f"{section}.{key}=2020-01-01")
        assert f"[{section}] {key}" in message and "2020-01-01" in message
        assert not re.search(r"pydantic|https?:|errors\.|Input should|validation error|type=", message), message
        assert "another kind of value" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[task]\nkind = translate\n", "x.toml:2: not valid TOML"),
        ("[task]\nkind = 'a'\nkind = 'b'\n", "x.toml:3: not valid TOML"),
        ("[task]\nkind = 'a'\n[task]\n", "x.toml:3: not valid TOML"),
        ("[task\n", "x.toml:1: not valid TOML"),
        ("[task]\nkind = '''a\n", "x.toml:3: not valid TOML"),
    ],
)
def test_toml_syntax_error_has_its_line(text: str, expected: str) -> None:
    assert report(text).startswith(expected)


def test_file_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such run file"):
        load_run_file(tmp_path / "none.toml")
    with pytest.raises(InputError, match="is a folder"):
        load_run_file(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"[task]\nkind = '\xff'\n")
    with pytest.raises(InputError, match=r"broken\.toml:2: not valid UTF-8"):
        load_run_file(broken)


def test_lines_are_found_for_tables_and_keys() -> None:
    lines = find_lines("# [no]\n[a]\nx = 1\n\n[a.b]\n'y' = { z = 2 }\nc.d = 3\n")
    assert lines == {("a",): 2, ("a", "x"): 3, ("a", "b"): 5, ("a", "b", "y"): 6, ("a", "b", "c", "d"): 7}


@pytest.mark.parametrize(
    "changes",
    [{}, {"family": "encoder", "gated": True}, {"family": "decoder", "heads": 4, "kv_heads": 2, "head_size": 11}],
)
def test_the_least_parameters_are_those_of_the_layers(changes: dict[str, Any]) -> None:
    """Counted on the built model: the weights of linear maps below a layer."""
    from clearhead.core import build

    hparams = Hyperparameters(layers=3, width=28, feedforward=19, **({"heads": 7} | changes))
    module = build(build_spec(hparams, source_vocab=5, target_vocab=5), device="meta")
    weights = [weight.numel() for name, weight in module.named_parameters() if ".layers." in name and weight.dim() == 2]
    assert least_parameters(hparams) == sum(weights)
