"""Output of `repr` and `print`: a few readable lines for any object."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead import spec
from clearhead.apps.compare.fairness import Fairness
from clearhead.apps.compare.report import RunComparison
from clearhead.base.printing import MOST_LINES, WIDTH, Printed, human_bytes, short
from clearhead.interpret.maps.hook_points import capture
from clearhead.spec.describe import model_summary
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training.runfile.read import parse_run_file
from tests.hf_specs import hf_specs
from tests.house.test_public import NAMES
from tests.parity.architectures.harness import all_cases

MANY = 10_007
TABLES = ch.surgery.SurgeryReport | ch.check.Report | ch.SweepResult
"""What print shows whole."""
RUN_FILE = """
task.kind = "translate"
data.train = { source = "train.de", target = "train.en" }
data.valid = { source = "valid.de", target = "valid.en" }
model.family = "encoder-decoder"
model.preset = "transformer"
train.run = "runs/de-en"
train.steps = 100
tokenizer.kind = "bpe"
"""


def check_readable(subject: object) -> str:
    """Check that an object prints as a few readable lines, and return them."""
    text = repr(subject)
    lines = text.splitlines()
    assert 1 <= len(lines) <= MOST_LINES and max(map(len, lines)) <= WIDTH, text
    assert " at 0x" not in text
    assert str(subject) == text or isinstance(subject, TABLES | Exception)
    return text


@pytest.fixture(scope="module")
def model() -> ch.Model:
    tokenizer = train_tokenizer("character", ["abcdefgh .,x_"], vocab_size=40, mask=True)
    hparams = Hyperparameters(
        family="encoder-decoder", layers=2, width=14, heads=2, feedforward=17, dropout=0.0, tie="none"
    )
    sizes = {"source_vocab": tokenizer.vocab_size, "target_vocab": tokenizer.vocab_size}
    module = ch.build(build_spec(hparams, **sizes)).eval()
    return ch.Model(module, TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind="translate"))


@pytest.fixture(scope="module")
def things(model: ch.Model) -> dict[type, Any]:
    """Return a full object of every public class except the nodes of specs."""
    words, text = ["word"] * MANY, "text " * MANY
    fairness = Fairness((text,), (text,), (text,), frozenset(), frozenset())
    ids = torch.ones(2, 5, dtype=torch.long)
    cache = ch.Cache()
    output = model.module(ch.core.Sequence(ids), ch.core.Sequence(ids), cache=cache)
    edited = ch.surgery.keep_layers(model, [1], stack="encoder")
    finding = ch.check.Finding(text, text, mathematics=text, fix=text, alternatives=("no_scaling",))
    examples = [
        ch.check.Report(
            text, "wrong", (finding, *[ch.check.Finding("a", "b")] * MANY), compared=tuple(words), notes=tuple(words)
        ),
        finding,
        ch.Answer(text, 0.5, 3, 7),
        ch.Classification("a", 0.9, dict.fromkeys(map(str, range(MANY)), 0.1), labels=tuple(words)),
        ch.Entity("PER", text, 0, 5, 0.25),
        ch.Filled("a", "a", 0.5, 0, 1, text),
        ch.Generation(text, words, -0.123456789, "end"),
        ch.Hypothesis(text, words, -1.0, -2.0),
        ch.PairScore((7,) * MANY, (-0.1,) * MANY, -2.0, -1.0),
        ch.HeadStatistics("encoder.self", 0, 1, 0.123456789, spread={"entropy": 0.1234567}, num_texts=7),
        ch.TrainResult(Path("runs/x"), 7, "step-7", 0.123456789, 3.0, "all steps are done"),
        ch.SweepResult(Path("runs/x"), (Path("runs/x/y"),) * MANY, {"z": text}, RunComparison((), fairness), None),
        ch.InputError("expected one, received two: leave one out"),
        ch.RunFailure("the loss is not finite"),
        ch.MultiHeadAttention(24, 3),
        ch.core.Attention(24, spec.Attention(num_heads=3, num_kv_heads=3, head_size=8)),
        ch.core.Sequence(ids),
        model.attention("abc de", target="fa cb"),
        ch.diff(model, model),
        *(model, model.module, cache, output, edited, edited.report, ch.HookPoints()),
    ]
    return {type(example): example for example in examples}


def public_classes() -> set[type]:
    modules = [importlib.import_module(name) for name in NAMES]
    named = {getattr(module, name) for module in modules for name in module.__all__}
    return {public for public in named if inspect.isclass(public) and not issubclass(public, spec.Node)}


def test_every_public_class_prints_a_few_lines(things: dict[type, Any]) -> None:
    assert set(things) == public_classes()
    for subject in things.values():
        check_readable(subject)


def test_what_is_behind_them_prints_a_few_lines(model: ch.Model) -> None:
    with capture(model.module, "**") as seen:
        model.translate("abc")
    maps, measured = model.attention("abc", "cb"), model.evaluate([("abc", "cb"), ("de", "ed")])
    behind = (model.tokenizers, model.tokenizers.source, model.task, seen, parse_run_file(RUN_FILE, "run.toml"))
    for subject in (*behind, measured, maps.effects()[0], maps.contributions()[0]):
        check_readable(subject)
    assert len(repr(maps.effects()[0])) < 90 and repr(measured).splitlines() == list(measured.lines())


def test_collections_print_as_what_they_are() -> None:
    assert "labels=('even',)" in repr(ch.Classification("even", 0.9, {"even": 0.9}, labels=("even",)))
    shown = {("a", 1): "('a', 1)", (): "()", frozenset({7}): "{7}", frozenset(): "set()"}
    assert {value: short(value) for value in shown} == shown


def test_records_in_a_list_can_be_told_apart(things: dict[type, Any]) -> None:
    records = [record for record in things.values() if isinstance(record, Printed) and "\n" in repr(record)]
    for record in records:
        first, *rest = repr(record).splitlines()
        assert first == f"{type(record).__name__}(" and rest[-1].endswith(")"), repr(record)
    assert len(records) > 4


def test_a_model_says_what_it_is(model: ch.Model) -> None:
    text = check_readable(model)
    count = sum(parameter.numel() for parameter in model.module.parameters())
    for words in ("translate", f"{count:,} parameters", "float32 on cpu", "encoder: 2 layers, width 14, 2 heads"):
        assert words in text


@pytest.mark.parametrize("number", [1, 2])
def test_one_of_a_kind_is_singular(number: int) -> None:
    sizes = Hyperparameters(family="decoder", layers=number, width=14, heads=number, feedforward=3)
    (line, _) = model_summary(build_spec(sizes, source_vocab=11, target_vocab=11))
    end = "" if number == 1 else "s"
    assert f"{number} layer{end}, width 14, {number} head{end}, " in line


def test_shapes_stand_for_tensors() -> None:
    assert repr(ch.Output(torch.zeros(2, 3, 5))) == "Output(hidden=float32 [2, 3, 5])"
    assert "weight=[7]" in repr(ch.build(ch.presets.gpt2(vocab_size=11)).get_submodule("decoder.final_norm")).replace(
        "768", "7"
    )


@pytest.mark.parametrize("name", sorted(case.name for case in all_cases()))
def test_specs_print_as_trees_that_tell_them_apart(name: str) -> None:
    """Two nodes of a model that differ print differently, if they are printed whole."""
    nodes = {node for _, node in spec.walk(hf_specs()[name])}
    texts = {check_readable(node) for node in nodes}
    assert len(texts) == len(nodes)


def test_the_example_of_the_tour_is_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "tour.md").read_text("utf-8")
    assert f"```text\n{ch.presets.gpt2(vocab_size=50257)}\n```" in page


def test_equal_layers_are_one_and_differing_ones_are_named() -> None:
    whole = ch.presets.gpt2(vocab_size=97)
    assert whole.decoder is not None
    assert repr(whole).count("layers.0-11: Layer") == 1
    assert "LayerNorm(eps=0.001)" in repr(
        spec.Step(branches=whole.decoder.layers[0].steps[0].branches, out=spec.LayerNorm(eps=1e-3))
    )
    other = whole.decoder.layers[0].model_copy(update={"steps": whole.decoder.layers[0].steps[:1]})
    stack = whole.decoder.model_copy(update={"layers": (other, *whole.decoder.layers[1:3], other)})
    text = repr(stack)
    assert "layers.0,3: Layer" in text and "layers.1-2: Layer" in text


def test_long_texts_say_how_long_they_are(things: dict[type, Any]) -> None:
    text = repr(things[ch.Generation])
    assert f"{MANY:,} in all" in text and f"({5 * MANY:,} characters)" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (1500, "1.5 kB"), (99_960, "100 kB"), (41_700_000, "41.7 MB"), (2**50, "1125.9 TB")],
)
def test_sizes_read_as_a_person_writes_them(count: int, text: str) -> None:
    assert human_bytes(count) == text
