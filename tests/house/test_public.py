"""House rule 9: the public names. A name that appears or disappears here is a decision, not an accident.

The command line's options are listed in tests/apps/cli/.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from types import FunctionType, ModuleType

import pytest

import clearhead
from tests.house.source import package_sources

NAMES = {
    "clearhead": """
        Answer AttentionMaps Cache Classification Difference Entity Filled Generation HeadStatistics HookPoints
        Hypothesis InputError Model MultiHeadAttention Output PairScore RunFailure SweepResult TrainResult Transformer
        __version__ build capture check diff edit load presets register spec surgery sweep train view_attention
    """,
    "clearhead.apps.check": "Finding Report attention layer loss module norm positions rope transformer",
    "clearhead.core": "Attention Cache MultiHeadAttention Output Sequence Transformer build",
    "clearhead.spec.presets": "bert_base gpt2 llama_tiny t5_small transformer_base transformer_big",
    "clearhead.spec": """
        Activation ActivationName Alibi Attention BandScaling Biases Branch Causal ClampedGate Disentangled
        DistanceTable DynamicScaling Embedding EmbeddingPosition FeedForward Full Function Head HeadLayer Layer
        LayerNorm Learned Linear LinearScaling LongRopeScaling Mask MixtureOfExperts Model Node Norm Normal
        Part PlainNorm Pool PoolMode Projection QueryKeyNorm RMSNorm Reference RelativeBuckets
        Rotary RotaryScaling Router ScoreBias ScoreTable Sinusoidal SoftCap Stack Step Table L2Normalize
        Window Xavier YarnScaling consistency_faults map_nodes own_parts presets validate walk
    """,
    "clearhead.apps.surgery": """
        EditedModel SurgeryReport cut_vocabulary grow_vocabulary keep_layers remove_heads remove_neurons replace_head
        resize_positions scale_rotary to_encoder to_encoder_decoder
    """,
}
"""The packages that export names; names of other packages are imported from their modules."""

# What a user calls on the objects above.
METHODS = {
    "AttentionMaps": """
        beams choose contributions effects heads key_effects key_tokens layers lens norm_weighted num_heads
        outcome patch query_tokens record rollout save save_html save_picture stacks target_tokens to_json token_lists
        tokens weights with_module written_ids written_tokens
    """,
    "Cache": "extend select",
    "Difference": "largest save_html to_json with_texts",
    "Model": """
        answer attention capture classify edit embed evaluate exact fill for_languages for_task generate
        generate_options heads is_batch_invariant languages predict push_to_hub read save score search_options
        spec special_tokens stream tag tokenizer translate translate_n_best tree with_module word_aligner
    """,
    "MultiHeadAttention": "attention extra_repr forward train",
    "SweepResult": "record",
    "TrainResult": "load",
    "Transformer": """
        decode encode extra_repr forward is_watched max_positions num_source_ids num_target_ids point
    """,
}


def listed_names(module: object) -> set[str]:
    return set(getattr(module, "__all__", ()))


def test_other_packages_export_nothing() -> None:
    for source in package_sources():
        name = source.path.removesuffix("/__init__.py").replace("/", ".")
        if source.path.endswith("__init__.py") and name not in (*NAMES, "clearhead.apps"):
            assert not [node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)], name


@pytest.mark.parametrize("package", NAMES)
def test_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert listed_names(module) == set(NAMES[package].split())
    assert all(hasattr(module, name) for name in listed_names(module))
    assert set(dir(module)) == listed_names(module)


def public_methods(owner: type) -> set[str]:
    """Return the methods and properties that the classes of clearhead give to an object."""
    ours = [base for base in owner.__mro__ if base.__module__.startswith("clearhead")]
    members = {name: value for base in ours for name, value in vars(base).items() if not name.startswith("_")}
    kinds = (property, classmethod, staticmethod)
    return {name for name, value in members.items() if inspect.isfunction(value) or isinstance(value, kinds)}


@pytest.mark.parametrize("name", METHODS)
def test_public_methods(name: str) -> None:
    assert public_methods(getattr(clearhead, name)) == set(METHODS[name].split())


def test_presets_build_a_spec_each() -> None:
    for name in NAMES["clearhead.spec.presets"].split():
        assert isinstance(getattr(clearhead.presets, name)(vocab_size=97), clearhead.spec.Model)


@pytest.mark.parametrize("package", NAMES)
def test_every_public_name_has_a_docstring(package: str) -> None:
    """Private code is checked by ruff, which sees no docstring that a method inherits."""
    module = importlib.import_module(package)
    objects = {name: getattr(module, name) for name in NAMES[package].split()}
    for name, owner in [*objects.items()]:
        if package == "clearhead" and name in METHODS:
            objects |= {f"{name}.{method}": getattr(owner, method) for method in METHODS[name].split()}
    kinds = (type, property, ModuleType, FunctionType)
    described = {name: value for name, value in objects.items() if isinstance(value, kinds)}
    assert len(described) >= 5
    assert not [name for name, value in described.items() if not inspect.getdoc(value)]
