"""House rule 9: the public names. A name that appears or disappears here is a decision, not an accident.

The command line's options are listed in tests/cli/.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

import clearhead
from tests.house.source import package_sources

NAMES = {
    "clearhead": """
        Answer Cache Classification Entity Filled Generation Hypothesis InputError Model MultiHeadAttention Output
        PairScore RunFailure Transformer build load presets spec surgery
    """,
    "clearhead.check": "",
    "clearhead.cli": "",
    "clearhead.compare": "",
    "clearhead.core": "Attention Cache MultiHeadAttention Output Sequence Transformer build",
    "clearhead.data": """
        Batch DatasetPairs EpochBatches FilePair FilterReport JsonLinesPairs PairSource PairStore Plan SpecialIds
        TokenBatches TsvPairs cache_root cached_tokenizers collate epoch_batches pair_batches pair_plan
        parse_pair_source prepare_pairs random_stream read_lines read_pairs
    """,
    "clearhead.data.noise": "Infill Masked PrefixLM PrefixSplit Spans build_noise num_sentinels",
    "clearhead.generate": """
        Candidate Continuation CorpusLoss GenerateOptions Generation Hypothesis PairScore Request SearchOptions TextLoss
        TranslationScores beam_search bleu_chrf evaluate_pairs generate_ids generate_texts length_normalised score_pairs
        score_sequences score_texts stream_ids stream_text text_loss texts_loss translate_ids
    """,
    "clearhead.predict": "",
    "clearhead.spec": """
        Activation ActivationName Alibi Attention BandScaling Biases Branch Causal ClampedGate Disentangled
        DistanceTable DynamicScaling Embedding EmbeddingPosition FeedForward Full Function Head HeadLayer Layer
        LayerNorm Learned Linear LinearScaling LongRopeScaling Mask MixtureOfExperts Model Node Norm Normal
        OutProjection Pool Prefix Projection QueryKeyNorm RMSNorm Reference RelativeBuckets Rotary RotaryScaling
        Router ScoreBias ScoreTable Sinusoidal SoftCap Stack Step Table TableHeads Unit Window Xavier YarnScaling
        consistency_faults rebuilt validate walk
    """,
    "clearhead.surgery": """
        Edited Report cut_vocabulary grow_vocabulary keep_layers remove_heads remove_neurons replace_head
        resize_positions scale_rotary to_encoder to_encoder_decoder
    """,
    "clearhead.text": "KINDS PublishedText Roles Tokenizer TokenizerPair load_published train_tokenizer",
    "clearhead.train": "",
    "clearhead.training.tasks.registry": "",
    "clearhead.view": "",
    "clearhead.weights": """
        Pretrained fill is_pretrained load_pretrained load_tensors save_pretrained save_tensors
    """,
    "clearhead.zoo": "RECIPES Recipe label_head presets resolve token_head vector_head with_head",
    "clearhead.hf.registry": "find headless records saved_first variant",
}

# What a user calls on the objects above.
METHODS = {
    "Cache": "extend select",
    "Model": """
        answer classify embed fill for_languages for_task frame generate replaced save score spec stream tag tokenizer
        translate translate_n_best
    """,
    "MultiHeadAttention": "attend body forward",
    "Transformer": "decode encode forward max_positions num_source_ids num_target_ids states",
}
PRESETS = "bert_base gpt2 llama_tiny t5_small transformer_base transformer_big"


def listed(module: object) -> set[str]:
    return set(getattr(module, "__all__", ()))


def test_every_package_is_listed() -> None:
    found = {source.path.removesuffix("/__init__.py").replace("/", ".") for source in package_sources()}
    assert {name for name in found if not name.endswith(".py")} == set(NAMES)


@pytest.mark.parametrize("package", NAMES)
def test_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert listed(module) == set(NAMES[package].split())
    assert all(hasattr(module, name) for name in listed(module))


def public_methods(owner: type) -> set[str]:
    """Functions and properties that our own classes give to an object."""
    ours = [base for base in owner.__mro__ if base.__module__.startswith("clearhead")]
    found = {name: value for base in ours for name, value in vars(base).items() if not name.startswith("_")}
    kinds = (property, classmethod, staticmethod)
    return {name for name, value in found.items() if inspect.isfunction(value) or isinstance(value, kinds)}


@pytest.mark.parametrize("name", METHODS)
def test_public_methods(name: str) -> None:
    assert public_methods(getattr(clearhead, name)) == set(METHODS[name].split())


def test_presets_build_a_spec_each() -> None:
    module = clearhead.presets
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    assert {value.__name__ for value in own if not value.__name__.startswith("_")} == set(PRESETS.split())
    for name in PRESETS.split():
        assert isinstance(getattr(module, name)(vocab_size=97), clearhead.spec.Model)
