"""The makers of labelled data: trees become phrases, and source code becomes tagged tokens, or questions about it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from clearhead.data.sources.tables import DataTable
from clearhead.tasks.answer.data import DATA as ANSWERS
from clearhead.tasks.answer.data import read_answers
from clearhead.tasks.tag.data import DATA as TAGS
from clearhead.tasks.tag.data import read_tagged
from clearhead.tasks.tag.tag_set import find_scheme

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return load


def test_a_tree_is_all_its_phrases(example) -> None:  # type: ignore[no-untyped-def]
    tree = "(4 (2 -LRB-) (3 (2 A) (3 fine\\/dull)) (2 -RRB-))"
    expected = [
        ("-LRB-", 2),
        ("A", 2),
        ("fine\\/dull", 3),
        ("A fine\\/dull", 3),
        ("-RRB-", 2),
        ("-LRB- A fine\\/dull -RRB-", 4),
    ]
    assert list(example("make_sst").phrases(tree)) == expected


def test_phrases_have_one_polarity_and_are_no_test_sentence(example) -> None:  # type: ignore[no-untyped-def]
    trees = ["(3 (4 Good) (1 bad))", "(1 (3 Bad) (0 sad))", "(4 (4 good) (2 x))", "(1 (4 good) (0 sad))"]
    phrases, num_torn = example("make_sst").labelled_phrases(trees, held_out={"good x"})
    assert phrases == [("good", "positive"), ("good bad", "positive"), ("sad", "negative"), ("bad sad", "negative"),
                     ("good sad", "negative")]  # fmt: skip
    assert num_torn == 1


def test_all_sentences_of_the_treebank(example, data_dir: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    example("make_sst").make_sst(data_dir / "sst2", data_dir / "sst-trees", tmp_path)
    tables = {
        name: [line.split("\t") for line in (tmp_path / f"{name}.tsv").read_text(encoding="utf-8").splitlines()[1:]]
        for name in ("train", "valid", "test", "phrases", "train-5")
    }
    assert (len(tables["valid"]), len(tables["test"])) == (872, 1821)
    held_out = {text for name in ("valid", "test") for text, _ in tables[name]}
    phrases = dict(tables["phrases"])
    assert len(phrases) == len(tables["phrases"]) > 70_000
    assert held_out.isdisjoint(phrases)
    # Same words, same case, same brackets: or the sentences would not be found again among the phrases.
    assert all(phrases[text] == label for text, label in tables["train"])
    plain = (tmp_path / "sentences.txt").read_text(encoding="utf-8").splitlines()
    assert held_out.isdisjoint(plain) and len(plain) > 8_500


SOURCE = '''"""Doc."""
import os.path as p, sys
from . import a
from ..b.c import d as e

@p.wraps(1)
class K(x.Base, object):
    y: dict[str, int] = {}

    def f(self, n: int, *, m=None) -> "str":
        """Doc."""
        # a note
        z = len(n) + m.real(k=1, v=f"{n}")
        except_ = self.z  # another
        def g(): return z
        return G(z, "a b")

match = 1
# alone
if match: pass
'''
SENTENCES = [
    '""|docstring',
    "import|keyword os|module .|I-module path|I-module as|keyword p|module ,|punctuation sys|module",
    "from|keyword .|operator import|keyword a|imported",
    "from|keyword .|operator .|operator b|module .|I-module c|I-module import|keyword d|imported as|keyword e|imported",
    "@|operator p|decorator .|I-decorator wraps|I-decorator (|punctuation 1|number )|punctuation",
    "class|keyword K|class (|punctuation x|base .|I-base Base|I-base ,|punctuation object|base )|punctuation"
    " :|punctuation",
    "y|global :|punctuation dict|annotation [|I-annotation str|I-annotation ,|I-annotation int|I-annotation"
    " ]|I-annotation =|operator {|punctuation }|punctuation",
    "def|keyword f|function (|punctuation self|parameter ,|punctuation n|parameter :|punctuation int|annotation"
    " ,|punctuation *|operator ,|punctuation m|parameter =|operator None|constant )|punctuation ->|punctuation"
    ' ""|annotation :|punctuation ""|docstring #|comment z|variable =|operator len|builtin (|punctuation n|parameter'
    " )|punctuation +|operator m|parameter .|operator real|method (|punctuation k|argument =|operator 1|number"
    ' ,|punctuation v|argument =|operator f""|string )|punctuation except_|variable =|operator self|parameter'
    " .|operator z|attribute #|comment def|keyword g|function (|punctuation )|punctuation :|punctuation return|keyword"
    ' z|variable return|keyword G|call (|punctuation z|variable ,|punctuation ""|string )|punctuation',
    "match|global =|operator 1|number",
    "#|comment if|keyword match|global :|punctuation pass|keyword",
]


def test_every_token_says_what_it_is(example) -> None:  # type: ignore[no-untyped-def]
    sentences = list(example("make_tags").tagged_sentences(SOURCE))
    tagged = [" ".join(f"{token}|{tag.removeprefix('B-')}" for token, tag in sentence) for sentence in sentences]
    assert tagged == SENTENCES
    tags = [[tag for _, tag in sentence] for sentence in sentences]
    data = DataTable({"tags": tags}, range(len(tags)), lambda row, word: "")
    assert find_scheme(data) == "IOB2"


def test_files_that_can_be_learned_from(example, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    example("make_tags").make_tags(tmp_path, 60_000)
    parts = [read_tagged(TAGS.source({"text": str(tmp_path / f"{name}.conll")})) for name in ("train", "test")]
    assert all(find_scheme(sentences) == "IOB2" for sentences in parts)
    scores = example("tag_baseline").most_frequent_tags(*parts)
    assert 0.5 < scores.all.f1 < 0.95


def test_questions_about_functions(example) -> None:  # type: ignore[no-untyped-def]
    source = '''
class K:
    def f(self, n, /, *, m=(1, "a")):
        """Add n
        and m. Slowly."""
        return n + m
async def g(x, *rest: int, **n: str):
    """No sentence here: """
'''
    (group,) = example("make_questions").contexts(source)
    texts = ['def f(self, n, /, *, m=(1, \'a\')):\n    """Add n and m."""\n    return n + m', "def g(x, *rest, **n):"]
    assert [question.text for question in group] == texts
    questions = list(example("make_questions").questions(group))
    context = "\n".join(texts)
    assert all(context[start:].startswith(answer) for _, answer, start in questions)
    assert {question: answer for question, answer, _ in questions} == {
        "What does f do?": "Add n and m",
        "What does f return?": "n + m",
        "What is the default of m in f?": "(1, 'a')",
        "What is the first parameter of f?": "n",
        "What is the last parameter of f?": "m",
        "What is the first parameter of g?": "x",
        "What is the last parameter of g?": "n",
        "Which function has the parameter m?": "f",
        "Which function has the parameter x?": "g",
        "Which function has the parameter rest?": "g",
    }


def test_questions_that_can_be_read(example, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    example("make_questions").make_questions(tmp_path, 60_000)
    parts = {}
    for name in ("train", "valid", "test"):
        parts[name] = read_answers(ANSWERS.source({"text": str(tmp_path / f"{name}.jsonl")}))
        assert len(parts[name]) > 5 and all(len(answers) == 1 for answers in parts[name]["answers"])
    assert set(parts["train"]["context"]).isdisjoint(parts["test"]["context"])
