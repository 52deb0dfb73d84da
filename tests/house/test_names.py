"""House rule 1: the core, training and search know no architecture by name, and nothing branches on one."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house.source import Source, package_sources

ARCHITECTURES = (
    "albert bart bert bigbird blenderbot bloom camembert codegen cohere deberta deepseek distilbert electra falcon",
    "flan gemma gpt gptj granite llama longformer m2m marian mbart minilm mistral mixtral modernbert mpnet mpt mt5",
    "neox nllb olmo pegasus phi qwen roberta smollm stablelm starcoder t5 ul2 umt5 whisper xlm xlnet",
)
NAME = re.compile(rf"(?<![a-z])({'|'.join(' '.join(ARCHITECTURES).split())})(?![a-z])", re.IGNORECASE)
CAMEL_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


def architecture_names(source: Source) -> list[str]:
    """Return the architecture names in identifiers, strings, docstrings and comments."""
    faults = []
    for number, line in enumerate(source.text.splitlines(), 1):
        faults += [f"{source.path}:{number} {name}" for name in NAME.findall(CAMEL_HUMP.sub(" ", line))]
    return faults


def branches_on_names(source: Source) -> list[str]:
    """Return the comparisons and match cases with the name of an architecture."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare):
            tested: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            tested = [node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"startswith", "endswith"}:
            tested = list(node.args)
        else:
            continue
        constants = [constant for item in tested for constant in ast.walk(item) if isinstance(constant, ast.Constant)]
        faults += [
            f"{source.path}:{constant.lineno} {constant.value!r}"
            for constant in constants
            if NAME.search(str(constant.value))
        ]
    return faults


def modules(source: Source) -> list[str]:
    """Return the classes that derive from a torch module, and the imports of torch.nn."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
            if bases & {"Module", "ModuleList", "ModuleDict", "Sequential"}:
                faults.append(f"{source.path}:{node.lineno} class {node.name}")
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        if any(name == "torch.nn" or name.startswith("torch.nn.") for name in imported):
            faults.append(f"{source.path}:{node.lineno} imports torch.nn")
    return faults


@pytest.mark.parametrize("package", ["core", "training", "generate"])
def test_no_architecture_name(package: str) -> None:
    faults = [fault for source in package_sources(package) for fault in architecture_names(source)]
    assert not faults, "architecture names belong in checkpoints/hf/families/ and spec/presets/:\n" + "\n".join(faults)


def test_no_branch_on_a_name() -> None:
    faults = [fault for source in package_sources() for fault in branches_on_names(source)]
    assert not faults, "what differs between architectures is data in the spec:\n" + "\n".join(faults)


@pytest.mark.parametrize("package", ["presets", "hf"])
def test_no_module_class(package: str) -> None:
    faults = [fault for source in package_sources(package) for fault in modules(source)]
    assert not faults, f"{package}/ is data:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    "text",
    ["class GPT2Block: ...", "x = 'as in BERT'", "# like T5", "t5_bias = 1", "def load_bert(): ...", "neoxStyle = 1"],
)
def test_the_name_rule_can_fail(text: str) -> None:
    assert architecture_names(Source.of(text))


@pytest.mark.parametrize("text", ["import torch", "adapt = 1", "class Transformer: ...", "# sm50 at 5", "alphabet = 1"])
def test_the_name_rule_lets_words_pass(text: str) -> None:
    assert not architecture_names(Source.of(text))


@pytest.mark.parametrize(
    "text",
    ["if kind == 'bert': ...", "match k:\n    case 'gpt2': ...", "k.startswith('t5-')", "x = k in ('llama', 'a')"],
)
def test_the_branch_rule_can_fail(text: str) -> None:
    assert branches_on_names(Source.of(text))


def test_the_module_rule_can_fail() -> None:
    assert modules(Source.of("class A(nn.Module): ..."))
    assert modules(Source.of("from torch import nn"))
    assert not modules(Source.of("class A(BaseModel): ..."))
