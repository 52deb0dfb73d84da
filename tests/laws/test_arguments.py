"""A value of a wrong type, in any argument of any public function, is one sentence or works; it never fails inside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import clearhead as ch
from clearhead import presets, surgery
from clearhead.errors import InputError
from clearhead.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.presets.task_heads import label_head, token_head, vector_head
from clearhead.spec import Full
from clearhead.task import Noise, TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer

TEXTS = ["a b c d", "b c d e", "c d e f"]
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
    "node": Full(),
}  # fmt: skip
FUNCTIONS = {
    "spec.validate": ch.spec.validate,  # with which every module is built
    **{f"ch.{name}": getattr(ch, name) for name in ("load", "train", "capture", "edit")},
    **{f"presets.{name}": getattr(presets, name) for name in presets.__all__},
    **{f"surgery.{name}": getattr(surgery, name) for name in surgery.__all__ if name[0].islower()},
    **{
        f"Model.{name}": member
        for name, member in inspect.getmembers(ch.Model, inspect.isfunction)
        # Every argument of generate_options is an option of generate, whose values have tests of their own.
        if name == "__init__" or (not name.startswith("_") and name != "generate_options")
    },
}


@cache
def model(kind: str) -> ch.Model:
    """A tiny model of one kind, with weights as they were drawn."""
    family = {"translate": "encoder-decoder", "generate": "decoder"}.get(kind, "encoder")
    tokenizer = train_tokenizer("word", TEXTS, vocab_size=100, mask=True)
    head = {"classify": label_head(8, 2, pool="mean"), "tag": token_head(3), "embed": vector_head(pool="mean")}.get(
        kind
    )
    sizes = Hyperparameters(family=family, layers=1, width=8, heads=2, feedforward=11)
    given = {} if head is None else {"head": head}
    spec = build_spec(sizes, source_vocab=tokenizer.vocab_size, target_vocab=tokenizer.vocab_size, **given)
    record = TaskRecord(kind=kind, max_length=17, **RECORDS[kind])
    return ch.Model(ch.build(spec).eval(), TokenizerPair(tokenizer, tokenizer, True), record)


def usual(name: str, parameter: inspect.Parameter, kind: str) -> dict[str, Any]:
    whole = model(kind)
    own = {"spec.Model": whole.spec, "AnyModel": whole, "TokenizerPair": whole.tokenizers, "TaskRecord": whole.task}
    if name in ("self", "model", "module"):
        return {name: whole if name == "self" else own.get(str(parameter.annotation), whole.module)}
    if parameter.default is not parameter.empty:
        return {}
    return {name: own.get(str(parameter.annotation), USUAL.get(name, "a"))}


def called(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call, and do what makes the work happen."""
    found = function(**arguments)
    if isinstance(found, Iterator):
        list(found)
    elif isinstance(found, AbstractContextManager) and not isinstance(found, nn.Module):
        with found:
            pass


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_type_is_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    kinds = {"fill": "fill", "classify": "classify", "tag": "tag", "embed": "embed"}
    kind = kinds.get(name.rpartition(".")[2], "generate" if "generate" in name or "stream" in name else "translate")
    rest: dict[str, Any] = {"max_new_tokens": 2} if kind == "generate" else {}
    rest |= {"max_length": 3} if name in ("Model.translate", "Model.translate_n_best") else {}
    for other, parameter in parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            rest |= usual(other, parameter, kind)
    wrong = 0
    for argument, parameter in parameters.items():
        for value in (make() for make in WRONG if argument not in ("self", "options")):
            is_right = argument == "path" and isinstance(value, str | Path)
            # The tests check numbers more strictly than Python's type checkers do.
            if is_right or (type(value) is int and "float" in str(parameter.annotation)):
                continue
            try:
                called(function, rest | {argument: value})
            except InputError:
                wrong += 1
            except RuntimeError:
                assert argument == "device", "torch says which devices there are"
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
    given = {"target": iter([TEXTS[0]] * 3)} if rest else {}
    assert [*map(str, answer(iter(texts), **given, **options))] == [*map(str, several)]
    assert len(answer([], **({"target": []} if rest else {}), **options)) == 0
