"""What a published checkpoint says beside its weights: its text, its generation, and the family it was written in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.core import Transformer
from clearhead.errors import InputError, nearest
from clearhead.files import read_json_object
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.prompts import PromptFormat
from clearhead.hf import registry
from clearhead.hf.files.tensor_files import TensorFiles
from clearhead.hf.loading import LoadedModule, load_module
from clearhead.hf.mapping import config as configs
from clearhead.hf.mapping.family import Family, Variant
from clearhead.hf.pooling import makes_vectors, with_head
from clearhead.hf.token_role_defaults import ROLE_IDS
from clearhead.hf.tokenizers import CheckpointTokenizers, load_tokenizers
from clearhead.spec import Model
from clearhead.task import TaskKind, TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import PrefixSuffix, SpecialTokens
from clearhead.text.tokenizer_files import has_tokenizer

SETTINGS = "generation_config.json"

# Options of generation that a search for translations has too.
_SEARCHED = (
    "beam_size",
    "length_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
)


@dataclass(frozen=True)
class HFCheckpoint:
    """What a checkpoint's folder holds beside its weights.

    Args:
        folder: where it was read.
        text: how it turns text into ids and back.
        rules: what its files say about generation.
        config: config.json as it was read.
        pretrained: the family as which the model is written; None: its family cannot say it any more.
    """

    folder: Path
    tokenizers: CheckpointTokenizers
    generation_config: GenerationConfig
    config: Mapping[str, Any]
    loaded: LoadedModule | None

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype | None = None) -> HFCheckpoint:
        """Load a checkpoint in the layout of the Hugging Face hub.

        Args:
            folder: with config.json, safetensors and the files of a tokenizer.
            dtype: of the weights; None: float32.

        Raises:
            InputError: anything that cannot be honoured, or a tokenizer that does not fit the model.
        """
        if not has_tokenizer(folder):
            raise InputError(
                f"{folder} holds no tokenizer: expected tokenizer.json, vocab.json with merges.txt, vocab.txt, or a "
                "SentencePiece model"
            )
        rules = read_generation_config(folder)
        text = load_tokenizers(folder)
        pretrained = load_module(folder, dtype=dtype)
        return cls(folder, with_decoder_tokens(text, rules, pretrained.module), rules, pretrained.config, pretrained)

    def replaced(self, module: Transformer, task: TaskRecord, tokenizers: TokenizerPair | None = None) -> HFCheckpoint:
        """Return the same for another module, such as one that was trained further.

        Args:
            module: the module.
            task: what its outputs are for.
            tokenizers: of the module; None: the same.
        """
        spare = {} if self.loaded is None else self.loaded.unused
        text = self.tokenizers if tokenizers is None else replace(self.tokenizers, pair=tokenizers)
        pad = text.pair.source.pad_id
        return replace(self, tokenizers=text, loaded=find_variant_for(self.config, module, task, spare, pad=pad))

    def options(self, given: Mapping[str, Any], module: Transformer) -> dict[str, Any]:
        """Return the options of generation: what is given, and for the rest what the files say.

        Args:
            given: options by name, without those that were left out.
            module: of the model.
        """
        asked = self.generation_config.options_with(given)
        if self.generation_config.max_length is not None:
            asked.setdefault("max_new_tokens", self.generation_config.max_length)
        if module.encoder is not None and self.generation_config.min_length > 1:
            # The bound counts the start token.
            shortest = self.generation_config.min_length - 1
            asked.setdefault("min_new_tokens", min(shortest, asked.get("max_new_tokens", shortest)))
        return asked

    def search_options(self, module: Transformer) -> dict[str, Any]:
        """Return what the files say about a search for translations, by the names of its options."""
        rules, own = self.generation_config, self.generation_config.options
        said: dict[str, Any] = {name: own[name] for name in _SEARCHED if name in own}
        said["early_stopping"] = rules.early_stopping
        # Bounds of the whole length count the start token, those of what is new none but an end that counts here.
        longest = own.get("max_new_tokens", (rules.max_length or 1) - 1)
        shortest = own["min_new_tokens"] + 1 if own.get("min_new_tokens") else rules.min_length
        if longest > 0:
            said["max_length"] = min(longest, module.max_positions or longest)
        if shortest > 1:
            said["min_length"] = min(shortest, module.max_positions or shortest)
        return said

    def for_task(self, task: str) -> tuple[HFCheckpoint, str]:
        """Return the checkpoint with its settings for a task, and what it puts in front of a text then.

        Args:
            task: a name that config.json lists, or the prefix of one.

        Raises:
            InputError: the files list no such task.
        """
        prefixes = self.generation_config.task_prefixes
        known = "; ".join(f"{name} ('{prefix.strip()}')" for name, prefix in prefixes.items())
        if not prefixes:
            raise InputError("the checkpoint lists no tasks: write the prefix into the prompt, and leave the task out")
        name = next((one for one, prefix in prefixes.items() if task in (one, prefix, prefix.strip())), None)
        if name is None:
            raise InputError(f"the checkpoint lists no task '{task}'{nearest(task, prefixes)}; it lists: {known}")
        return replace(self, generation_config=read_generation_config(self.folder, name)), prefixes[name]

    def reading(self, *, chat: bool, asked: int | None) -> PromptFormat:
        """Return how prompts are read.

        Args:
            chat: a prompt is a message.
            asked: how many tokens the caller wants; None: as many as the files say.

        Raises:
            InputError: there is no chat template.
        """
        if chat and self.tokenizers.chat is None:
            raise InputError("the checkpoint has no chat template: leave chat out")
        own = asked is None and "max_new_tokens" not in self.generation_config.options
        rules = self.generation_config if own else replace(self.generation_config, max_length=None)
        return PromptFormat(rules, self.tokenizers.chat if chat else None)

    def between(self, source: str | None, target: str | None) -> tuple[SpecialTokens, GenerationConfig]:
        """Return what stands around a source and what its decoder writes, and the rules for that, for two languages.

        Args:
            source, target: codes of languages; None where the model has none, or for the one that its files name.

        Raises:
            InputError: a language is missing, not known, or not wanted.
        """
        text, (read, said) = (
            self.tokenizers,
            (self.tokenizers.pair.source.special_tokens, self.tokenizers.pair.target.special_tokens),
        )
        given = [code for code in (source, target) if code is not None]
        if not text.languages:
            if given:
                raise InputError(f"the model has no language codes, so '{given[0]}' has no effect: leave it out")
            return replace(read, target=said.target), self.generation_config
        ids, known = set(text.languages.values()), ", ".join(text.languages)
        if source is None and ids.isdisjoint((*read.for_source.prefix, *read.for_source.suffix)):
            raise InputError(f"the model reads several languages: say which one the text is in; it has: {known}")
        # A run that trained between two languages has the second in what its decoder writes.
        own = said.target if said.target is not None and not ids.isdisjoint(said.target.prefix) else None
        if target is None and self.generation_config.forced_bos_id is None and own is None:
            raise InputError(f"the model writes several languages: say which one you want; it has: {known}")
        rules = self.generation_config
        if target is not None:
            index = text.language_id(target)
            rules = (
                replace(rules, decoder_start_id=index)
                if text.language_is_start
                else replace(rules, forced_bos_id=index)
            )
        elif own is not None:
            rules = replace(
                rules,
                decoder_start_id=own.prefix[0],
                forced_bos_id=own.prefix[1] if len(own.prefix) > 1 else rules.forced_bos_id,
            )
        special_tokens = read if source is None else text.special_tokens_for(source)
        return replace(special_tokens, target=_written_behind_encoder(rules, (), text.pair.target.eos_id)), rules

    def for_languages(self, source: str | None, target: str | None) -> HFCheckpoint:
        """Return the checkpoint as one that reads one language and writes another.

        Args:
            source, target: as for `between`.

        Raises:
            InputError: as for `between`.
        """
        special_tokens, _ = self.between(source, target)
        pair = self.tokenizers.pair
        one = pair.source.with_special_tokens(special_tokens)
        tokenizers = TokenizerPair(
            one, one if pair.joint else pair.target.with_special_tokens(special_tokens), pair.joint
        )
        return replace(self, tokenizers=replace(self.tokenizers, pair=tokenizers))


def with_decoder_tokens(
    text: CheckpointTokenizers, rules: GenerationConfig, module: Transformer
) -> CheckpointTokenizers:
    """Return the text side of a checkpoint with what its decoder writes around texts.

    Args:
        text: as its tokenizer's files have it, which know nothing of the model.
        rules: what its files say about generation.
        module: of the checkpoint.
    """
    pair = text.pair
    special_tokens = pair.target.special_tokens
    if module.decoder is None:
        return text
    if module.encoder is None:
        opening = pair.target.bos_id if rules.bos_id is None else rules.bos_id
        end = rules.eos_ids[0] if rules.eos_ids else pair.target.eos_id
        # A text begins where another one could have ended, if its tokenizer puts nothing in front of it.
        written: PrefixSuffix | None = PrefixSuffix(special_tokens.prefix or (opening,), (end,))
    else:
        # The language in front of what is read is not the one that is written.
        prefix = () if text.languages else special_tokens.prefix
        written = _written_behind_encoder(rules, prefix, pair.target.eos_id)
    if written is None:
        return text
    target = pair.target.with_special_tokens(special_tokens.with_target(written))
    return replace(text, pair=TokenizerPair(target if pair.joint else pair.source, target, pair.joint))


def _written_behind_encoder(rules: GenerationConfig, prefix: tuple[int, ...], eos: int) -> PrefixSuffix | None:
    """Return what a decoder behind an encoder writes around a text; None where the files do not say."""
    if rules.decoder_start_id is None:
        return None
    front = prefix if rules.forced_bos_id is None else (rules.forced_bos_id,)
    # Some tokenizers put in front of a text what is the decoder's start already.
    front = front[1:] if front[:1] == (rules.decoder_start_id,) else front
    return PrefixSuffix((rules.decoder_start_id, *front), (rules.eos_ids[0] if rules.eos_ids else eos,))


def find_variant_for(
    config: Mapping[str, Any], module: Transformer, task: TaskRecord, spare: Mapping[str, Tensor], *, pad: int
) -> LoadedModule | None:
    """Return as which class of its family a module is written; None where the family cannot say it.

    Args:
        config: of the checkpoint that it came from.
        module: the module.
        task: what its outputs are for.
        spare: tensors that the checkpoint carried unused.
        pad: the id that fills batches, which classes of labels need to find the end of a text.
    """
    record = registry.find(config)
    said = {key: value for key, value in config.items() if key not in ("architectures", "problem_type")}
    said |= label_config(task)
    if task.kind == "classify" and said.get("pad_token_id") is None:
        said["pad_token_id"] = pad
    variants = sorted(record.variants, key=lambda one: one.task != task.kind)
    stacks = module
    if task.kind == "embed" and makes_vectors(module.spec):
        # How vectors are made of states is not said by a class, but in files beside it.
        stacks, variants = with_head(module, None, {}), [registry.headless(record)]
    variant = next((one for one in variants if _can_say(record, one, said, stacks)), None)
    if variant is None:
        return None
    named = config.get("architectures") or []
    classes = named if named and named[0] in variant.classes else [variant.classes[0]]
    kept = {name: one for name, one in spare.items() if any(re.fullmatch(pattern, name) for pattern in variant.unused)}
    prefix = "" if variant.is_bare else record.prefix_of(variant)
    return LoadedModule(module, task, {**said, "architectures": classes}, record, variant, prefix, (), kept)


def label_config(task: TaskRecord) -> dict[str, Any]:
    """Return what a config says of the labels of a task."""
    if task.kind not in ("classify", "tag"):
        return {}
    names = task.labels or ("LABEL_0",)
    kind = task.label_kind
    problem = kind if kind is None or kind == "regression" else f"{kind}_classification"
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
        **({"problem_type": problem} if problem is not None else {}),
    }


def _can_say(record: Family, variant: Variant, config: Mapping[str, Any], module: Transformer) -> bool:
    """Say whether a class of a family can be this module: as its config says it, or as another config would."""
    try:
        reading = configs.parse(record, config)
        if not reading.faults and not configs.differences(record.spec_of(reading.values, variant), module.spec):
            return True
        configs.to_config(record, variant, module.spec)
    except InputError:
        return spec_of_config(record, variant, config, module) is not None
    return True


def spec_of_config(record: Family, variant: Variant, config: Mapping[str, Any], module: Transformer) -> Model | None:
    """Return the spec that a config says, if a module differs from it in dropout alone, which computes nothing."""
    try:
        said = record.spec_of(configs.parse(record, config).values, variant)
    except InputError:
        return None
    differing = configs.differences(said, module.spec)
    return said if all(".dropout: " in line for line in differing) else None


def task_kind(folder: Path) -> TaskKind:
    """Return what the outputs of a checkpoint are for, without its weights.

    Raises:
        InputError: a family or a class that is not known.
    """
    config = read_json_object(folder / "config.json", what="a config.json")
    return registry.variant(registry.find(config), config, frozenset(TensorFiles(folder))).task


def read_generation_config(folder: Path, task: str | None = None) -> GenerationConfig:
    """Read what a checkpoint's files say about generation: generation_config.json, else the same keys of config.json.

    Args:
        folder: of the checkpoint.
        task: one of those whose settings config.json lists; they win over the others.

    Raises:
        InputError: a file is no JSON object, or holds values of a wrong type.
    """
    config = read_json_object(folder / "config.json", what="a config.json")
    config = {**ROLE_IDS.get(str(config.get("model_type")), {}), **config}
    tasks = config.get("task_specific_params")
    listed = {name: said for name, said in (tasks if isinstance(tasks, dict) else {}).items() if isinstance(said, dict)}
    prefixes = {name: said["prefix"] for name, said in listed.items() if isinstance(said.get("prefix"), str)}
    own = {} if task is None else listed[task]
    path = folder / SETTINGS
    if not path.is_file():
        rules = GenerationConfig.from_settings({**config, **own}, source=str(folder / "config.json"))
        return replace(rules, task_prefixes=prefixes)
    settings = read_json_object(path, what="a generation_config.json")
    # Ids of special tokens that the settings leave out are those of the model.
    ids = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    inherited = {key: config[key] for key in ids if key in config and settings.get(key) is None}
    return replace(
        GenerationConfig.from_settings({**settings, **inherited, **own}, source=str(path)), task_prefixes=prefixes
    )
