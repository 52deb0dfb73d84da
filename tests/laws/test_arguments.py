"""A wrong type in any argument of any public function works or gives a one-sentence message, no internal error."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead import presets, surgery
from clearhead.base.errors import InputError
from clearhead.spec import Full
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.task_heads import label_head, token_head, vector_head
from clearhead.spec.tasks.record import Noise, TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer

TEXTS = ["a b c d", "b c d e", "c d e f"]
IDS = torch.tensor([[1, 2, 3]])
RECORDS: dict[str, dict[str, Any]] = {
    "translate": {},
    "generate": {},
    "fill": {"noise": Noise(kind="mask", share=0.15)},
    "classify": {"labels": ("x", "y"), "label_kind": "single_label"},
    "tag": {"labels": ("O", "B-A", "I-A")},
    "embed": {},
}
WRONG: list[Callable[[], Any]] = [
    lambda: None,
    lambda: 3,
    lambda: 3.5,
    lambda: True,
    lambda: b"a b",
    lambda: "a b",
    list,
    lambda: [None],
    lambda: [3],
    lambda: [[]],
    lambda: [b"a"],
    lambda: ("a b", None),
    dict,
    lambda: {"a": 1},
    lambda: Path("a b"),
    lambda: (text for text in TEXTS),
    object,
]
# What the other arguments of a call are; those without a value here keep their default.
USUAL: dict[str, Any] = {
    "texts": TEXTS[:1], "prompt": "a b", "source": "a b", "text": "a b", "question": "a", "context": "b", "data": TEXTS,
    "patterns": "**", "pattern": "*", "edits": {}, "path": "out", "from_language": None, "to_language": None,
    "vocab_size": 23, "width": 14, "num_heads": 2, "length": 7, "ref": "nowhere", "run_file": {"task": {}},
    "heads": {}, "neurons": {}, "layers": [0], "words": ["x"], "keep": [0, 1, 2], "scaling": None, "head": None,
    "node": Full(), "ids": IDS, "target_ids": IDS, "query": torch.randn(1, 3, 14), "rows": torch.tensor([0]),
    "a": "nowhere", "b": "nowhere", "stack": "decoder.self", "layer": 0, "name": "hidden", "x": torch.randn(1, 3, 8),
}  # fmt: skip


def is_called(value: object) -> bool:
    """Return whether a public name is called: functions and classes, but no result records, errors or annotations."""
    is_record = dataclasses.is_dataclass(value) or (isinstance(value, type) and issubclass(value, Exception))
    return inspect.isfunction(value) or (isinstance(value, type) and not is_record)


def methods(owner: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class that are defined in clearhead, not in another library."""
    members = inspect.getmembers(
        owner, lambda member: inspect.isfunction(member) and member.__module__.startswith("clearhead")
    )
    return {f"{owner.__name__}.{name}": member for name, member in members if not name.startswith("_")}


OBJECTS: dict[str, Callable[[], Any]] = {
    "AttentionMaps": lambda: model("generate").attention("a b"),
    "Cache": ch.Cache,
    "Model": lambda: model("generate"),
    "MultiHeadAttention": lambda: ch.MultiHeadAttention(14, 2),
    "Transformer": lambda: model("generate").module,
}
PACKAGES = {"ch": ch, "spec": ch.spec, "presets": presets, "surgery": surgery}
FUNCTIONS = {
    f"{package}.{name}": getattr(module, name)
    for package, module in PACKAGES.items()
    for name in module.__all__
    if is_called(getattr(module, name))
}
for _owner in OBJECTS:
    FUNCTIONS |= methods(getattr(ch, _owner))
# Every argument of generate_options is an option of generate, whose values have tests of their own.
del FUNCTIONS["Model.generate_options"]
# A point does not look at its arguments while nothing is watched.
del FUNCTIONS["Transformer.point"]


def has_arguments(function: Callable[..., Any]) -> bool:
    kinds = {parameter.kind for name, parameter in inspect.signature(function).parameters.items() if name != "self"}
    return bool(kinds - {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


@cache
def model(kind: str) -> ch.Model:
    """Return a tiny model of one kind, with random weights."""
    family = {"translate": "encoder-decoder", "generate": "decoder"}.get(kind, "encoder")
    tokenizer = train_tokenizer("word", TEXTS, vocab_size=100, mask=True)
    head = {"classify": label_head(8, 2, pool="mean"), "tag": token_head(3), "embed": vector_head(pool="mean")}.get(
        kind
    )
    sizes = Hyperparameters(family=family, layers=1, width=8, heads=2, feedforward=11)
    head_option = {} if head is None else {"head": head}
    spec = build_spec(sizes, source_vocab=tokenizer.vocab_size, target_vocab=tokenizer.vocab_size, **head_option)
    record = TaskRecord(kind=kind, max_length=17, **RECORDS[kind])
    return ch.Model(ch.build(spec).eval(), TokenizerPair(tokenizer, tokenizer, True), record)


def usual(name: str, parameter: inspect.Parameter, kind: str) -> dict[str, Any]:
    whole = model(kind)
    values = {"spec.Model": whole.spec, "AnyModel": whole, "TokenizerPair": whole.tokenizers, "TaskRecord": whole.task}
    if name in ("self", "model", "module"):
        return {name: whole if name == "self" else values.get(str(parameter.annotation), whole.module)}
    if parameter.default is not parameter.empty:
        return {}
    return {name: values.get(str(parameter.annotation), USUAL.get(name, "a"))}


def call_fully(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call a function, and exhaust its result if it is an iterator."""
    result = function(**arguments)
    if isinstance(result, Iterator):
        list(result)
    elif isinstance(result, AbstractContextManager) and not isinstance(result, nn.Module):
        with result:
            pass


@pytest.mark.parametrize("name", [name for name, function in FUNCTIONS.items() if has_arguments(function)])
def test_a_wrong_type_is_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function, owner = FUNCTIONS[name], name.partition(".")[0]
    if owner in OBJECTS and owner != "Model":
        function = getattr(OBJECTS[owner](), name.partition(".")[2])
    parameters = inspect.signature(function).parameters
    kinds = {"fill": "fill", "classify": "classify", "tag": "tag", "embed": "embed"}
    kind = kinds.get(name.rpartition(".")[2], "generate" if "generate" in name or "stream" in name else "translate")
    rest: dict[str, Any] = {"max_new_tokens": 2} if kind == "generate" else {}
    rest |= {"max_length": 3} if name in ("Model.translate", "Model.translate_n_best") else {}
    for other, parameter in parameters.items():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            rest |= usual(other, parameter, kind)
    rest |= {"head": 0} if owner == "AttentionMaps" and "head" in parameters else {}
    wrong = 0
    for argument, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        for value in (make() for make in WRONG if argument not in ("self", "options")):
            is_right = argument == "path" and isinstance(value, str | Path)
            # The tests check numbers more strictly than Python's type checkers do.
            if is_right or (type(value) is int and "float" in str(parameter.annotation)):
                continue
            try:
                call_fully(function, rest | {argument: value})
            except InputError:
                wrong += 1
            except RuntimeError:
                # torch says which devices there are, and a vocabulary may not be able to write what a schema asks for.
                assert argument in ("device", "schema")
    assert wrong, "some of these values are wrong for every function"


@pytest.mark.parametrize(
    "method", ["translate", "translate_n_best", "generate", "classify", "tag", "fill", "embed", "score"]
)
def test_one_text_has_one_answer_and_several_have_a_list(method: str) -> None:
    kind = method if method in RECORDS else "translate"
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0} if method == "generate" else {}
    options |= {"max_length": 3} if "translate" in method else {}
    texts = [f"{text} ___" for text in TEXTS] if method == "fill" else TEXTS
    answer = getattr(model(kind), method)
    rest = {"target": TEXTS[0]} if method == "score" else {}
    single = answer(texts[0], **rest, **options)
    several = answer(texts, **({"target": [TEXTS[0]] * 3} if rest else {}), **options)
    assert type(several[0]) is type(single) and len(several) == 3
    targets = {"target": iter([TEXTS[0]] * 3)} if rest else {}
    assert [*map(str, answer(iter(texts), **targets, **options))] == [*map(str, several)]
    assert len(answer([], **({"target": []} if rest else {}), **options)) == 0


def test_a_pair_that_is_none_is_named_before_a_model_runs() -> None:
    maps = model("generate").attention("a b")
    with pytest.raises(InputError, match=r"of: expected .* or a tuple of 2 or a tuple of 3 or None, got"):
        maps.effects(of=("a", 1))
    assert maps.outcome((1, "b")).position == 1


def test_a_call_of_a_module_is_explained_where_it_fails_and_else_left_alone() -> None:
    module = model("generate").module
    with pytest.raises(InputError, match="ids: expected a Tensor or a Sequence, got 3"):
        module(3)
    with pytest.raises(IndexError):
        module(torch.tensor([[10**6]]))
    assert module(IDS, cache=ch.Cache()).logits is not None
