"""A Hugging Face checkpoint: a module of a family with its tokenizers and generation settings.

A model that is trained further or saved in clearhead's layout keeps the other files of its checkpoint in a folder
`origin`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.files import file_inside, write_json
from clearhead.base.printing import Printed
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.files.tensor_files import TensorFiles, read_config
from clearhead.checkpoints.hf.generation import GENERATION_CONFIG, read_generation_config
from clearhead.checkpoints.hf.loading import LoadedModule, OpenCheckpoint, load_module, open_checkpoint
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.family import Family, Variant
from clearhead.checkpoints.hf.pooling import makes_vectors, with_head
from clearhead.checkpoints.hf.tokenizers import CheckpointTokenizers, load_tokenizers
from clearhead.checkpoints.reference import CONFIG, ORIGIN
from clearhead.checkpoints.weights.files import load_tensors, save_tensors
from clearhead.core import Transformer
from clearhead.fast.stored import WeightForm
from clearhead.generate.generation_config import GenerationConfig
from clearhead.spec import Model
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.text.chat import ChatTemplate
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import PrefixSuffix, SpecialTokens
from clearhead.text.tokenizer_files import has_tokenizer

# Tokenizer files: copied unchanged, with those for generation, when a checkpoint is saved again.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "target_vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model",
    "tokenizer.model", "sentencepiece.model", "source.spm", "target.spm",
)  # fmt: skip
_OTHER_FILES = ("chat_template.jinja", GENERATION_CONFIG)
_UNUSED = "unused.safetensors"
_PROBLEM_TYPES = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


@dataclass(frozen=True, repr=False)
class HFCheckpoint(Printed):
    """A Hugging Face checkpoint: module, tokenizers and settings.

    Args:
        folder: the folder that the checkpoint was read from.
        tokenizers: the tokenizers, with the special tokens of the decoder.
        generation_config: the generation settings.
        config: the content of config.json.
        loaded: the module and the class of its family. None means that the family cannot express the module any more.
    """

    folder: Path
    tokenizers: CheckpointTokenizers
    generation_config: GenerationConfig
    config: Mapping[str, Any]
    loaded: LoadedModule | None

    @classmethod
    def load(cls, folder: Path, *, form: WeightForm | None = None) -> HFCheckpoint:
        """Load a checkpoint.

        Args:
            folder: the folder with config.json, safetensors and the files of a tokenizer.
            form: the form in which the module holds its weights, such as int8; None means float32.

        Raises:
            InputError: the checkpoint needs something that is not supported, or its tokenizer does not fit the model.
        """
        return cls._read(folder, lambda config: load_module(folder, config=config, form=form))

    @classmethod
    def read_headers(cls, folder: Path) -> tuple[HFCheckpoint, OpenCheckpoint]:
        """Read a checkpoint without its weights; its module is on the meta device.

        Args:
            folder: same as in `load`.

        Returns:
            The checkpoint, and its open files, from which tensors are read one at a time.

        Raises:
            InputError: same cases as in `load`.
        """
        opened: list[OpenCheckpoint] = []

        def read(config: Mapping[str, Any]) -> LoadedModule:
            opened.append(open_checkpoint(folder, config=config))
            return opened[0].loaded

        return cls._read(folder, read), opened[0]

    @classmethod
    def _read(cls, folder: Path, read: Callable[[Mapping[str, Any]], LoadedModule]) -> HFCheckpoint:
        # Refuse an unknown family first: its tokenizer may have other files.
        config = read_config(folder)
        registry.find_family(config)
        if not has_tokenizer(folder):
            raise InputError(
                f"{folder} has no tokenizer: expected tokenizer.json, vocab.json with merges.txt, vocab.txt, or a "
                "SentencePiece model"
            )
        tokenizers = load_tokenizers(folder)
        loaded = read(config)
        generation_config = read_generation_config(folder, config, loaded.module)
        tokenizers = with_decoder_tokens(tokenizers, generation_config, loaded.module)
        return cls(folder, tokenizers, generation_config, loaded.config, loaded)

    @classmethod
    def from_origin(
        cls, folder: Path, module: Transformer, task: TaskRecord, tokenizers: TokenizerPair
    ) -> HFCheckpoint:
        """Return the checkpoint from the files that `save_origin` wrote.

        Args:
            folder: the folder `origin` of a run or a saved model.
            module: the module of the model.
            task: the task of the module's outputs.
            tokenizers: the tokenizers of the model, which replace those of the checkpoint.

        Raises:
            InputError: files are missing or damaged.
        """
        config = read_config(folder)
        generation_config = read_generation_config(folder, config, module)
        checkpoint_tokenizers = replace(
            with_decoder_tokens(load_tokenizers(folder), generation_config, module), pair=tokenizers
        )
        unused = load_tensors(folder / _UNUSED) if (folder / _UNUSED).is_file() else {}
        loaded = find_variant(config, module, task, unused, pad=tokenizers.source.pad_id)
        return cls(folder, checkpoint_tokenizers, generation_config, config, loaded)

    def save_origin(self, folder: Path) -> None:
        """Write config.json, tokenizer and other files, and unused tensors to `origin` in a run or a saved model."""
        origin = folder / ORIGIN
        origin.mkdir(parents=True, exist_ok=True)
        write_json(origin / CONFIG, dict(self.config), is_indented=True)
        copy_files(self.folder, origin)
        if self.loaded is not None and self.loaded.unused:
            save_tensors(origin / _UNUSED, self.loaded.unused)

    def with_module(
        self, module: Transformer, task: TaskRecord, tokenizers: TokenizerPair | None = None
    ) -> HFCheckpoint:
        """Return the checkpoint with another module, such as one that was trained further.

        Args:
            module: the new module.
            task: the task of the module's outputs.
            tokenizers: the tokenizers of the module. None means those of the checkpoint.
        """
        unused = {} if self.loaded is None else self.loaded.unused
        checkpoint_tokenizers = self.tokenizers if tokenizers is None else replace(self.tokenizers, pair=tokenizers)
        loaded = find_variant(self.config, module, task, unused, pad=checkpoint_tokenizers.pair.source.pad_id)
        return replace(self, tokenizers=checkpoint_tokenizers, loaded=loaded)

    def for_task(self, task: str, module: Transformer) -> tuple[HFCheckpoint, str]:
        """Return the checkpoint with its generation settings for a task, and the prefix of the task's prompts.

        Args:
            task: the name of a task in `task_specific_params` of config.json, or the prefix of its prompts.
            module: the module of the checkpoint.

        Raises:
            InputError: config.json lists no such task.
        """
        prefixes = self.generation_config.task_prefixes
        known = "; ".join(f"{name} ('{prefix.strip()}')" for name, prefix in prefixes.items())
        if not prefixes:
            raise InputError("the checkpoint lists no tasks: write the prefix into the prompt, and leave the task out")
        name = next((name for name, prefix in prefixes.items() if task in (name, prefix, prefix.strip())), None)
        if name is None:
            raise InputError(f"the checkpoint lists no task '{task}'{did_you_mean(task, prefixes)}; it lists: {known}")
        config = read_generation_config(self.folder, self.config, module, name)
        return replace(self, generation_config=config), prefixes[name]

    def chat_template(self) -> ChatTemplate:
        """Return the template that formats a prompt as a message.

        Raises:
            InputError: there is no chat template.
        """
        if self.tokenizers.chat is None:
            raise InputError("the checkpoint has no chat template: leave chat out")
        return self.tokenizers.chat

    def prompt_config(self, options: Collection[str]) -> GenerationConfig:
        """Return the generation settings for continuing prompts, without limits that options of a call replace.

        Args:
            options: the names of the options of a call. `max_new_tokens` replaces the checkpoint's `max_length`, which
                counts the prompt too, and `min_new_tokens` replaces its `min_length`.
        """
        config = self.generation_config
        if "max_new_tokens" in {*options, *config.options}:
            config = replace(config, max_length=None)
        return replace(config, min_length=0) if "min_new_tokens" in options else config

    def language_settings(self, source: str | None, target: str | None) -> tuple[SpecialTokens, GenerationConfig]:
        """Return the special tokens and generation settings for two languages.

        Args:
            source, target: the language codes. None means the language that the checkpoint's files name, if any.

        Raises:
            InputError: a language is missing, unknown, or without effect.
        """
        tokenizers, config = self.tokenizers, self.generation_config
        source_tokens, target_tokens = tokenizers.pair.source.special_tokens, tokenizers.pair.target.special_tokens
        codes = [code for code in (source, target) if code is not None]
        if not tokenizers.languages:
            if codes:
                raise InputError(f"the model has no language codes, so '{codes[0]}' has no effect: leave it out")
            return replace(source_tokens, target=target_tokens.target), config
        ids, known = set(tokenizers.languages.values()), ", ".join(tokenizers.languages)
        if source is None and ids.isdisjoint((*source_tokens.for_source.prefix, *source_tokens.for_source.suffix)):
            raise InputError(f"the model reads several languages: name the language of the text; it has: {known}")
        # After training between two languages, the second is in the decoder's prefix.
        trained = () if target_tokens.target is None else target_tokens.target.prefix
        trained = () if ids.isdisjoint(trained) else trained
        if target is not None:
            index = tokenizers.language_id(target)
            if tokenizers.language_is_start:
                config = replace(config, decoder_start_id=index)
            else:
                config = replace(config, forced_bos_id=index)
        elif trained:
            forced = trained[1] if len(trained) > 1 else config.forced_bos_id
            config = replace(config, decoder_start_id=trained[0], forced_bos_id=forced)
        elif config.forced_bos_id is None:
            raise InputError(f"the model writes several languages: name the target language; it has: {known}")
        special_tokens = source_tokens if source is None else tokenizers.special_tokens_for(source)
        return special_tokens.with_target(_decoder_affixes(config, (), tokenizers.pair.target.eos_id)), config

    def for_languages(self, source: str | None, target: str | None) -> HFCheckpoint:
        """Return the checkpoint with the special tokens for a source and a target language.

        Args:
            source, target: same as in `language_settings`.

        Raises:
            InputError: same cases as in `language_settings`.
        """
        special_tokens, _ = self.language_settings(source, target)
        pair = self.tokenizers.pair
        first = pair.source.with_special_tokens(special_tokens)
        second = first if pair.joint else pair.target.with_special_tokens(special_tokens)
        return replace(self, tokenizers=replace(self.tokenizers, pair=TokenizerPair(first, second, pair.joint)))


def with_decoder_tokens(
    tokenizers: CheckpointTokenizers, config: GenerationConfig, module: Transformer
) -> CheckpointTokenizers:
    """Return the tokenizers of a checkpoint with the special tokens of its decoder.

    Args:
        tokenizers: the tokenizers, with the special tokens of their files, which do not depend on the model.
        config: the generation settings.
        module: the module of the checkpoint.
    """
    pair = tokenizers.pair
    special_tokens = pair.target.special_tokens
    if module.decoder is None:
        return tokenizers
    if module.encoder is None:
        opening = pair.target.bos_id if config.bos_id is None else config.bos_id
        end = config.eos_ids[0] if config.eos_ids else pair.target.eos_id
        # Where the tokenizer adds no prefix, a text begins with BOS.
        target: PrefixSuffix | None = PrefixSuffix(special_tokens.prefix or (opening,), (end,))
    else:
        # The language in the tokenizer's prefix is that of the source.
        prefix = () if tokenizers.languages else special_tokens.prefix
        target = _decoder_affixes(config, prefix, pair.target.eos_id)
    if target is None:
        return tokenizers
    target_tokenizer = pair.target.with_special_tokens(special_tokens.with_target(target))
    return replace(
        tokenizers, pair=TokenizerPair(target_tokenizer if pair.joint else pair.source, target_tokenizer, pair.joint)
    )


def _decoder_affixes(config: GenerationConfig, prefix: tuple[int, ...], eos: int) -> PrefixSuffix | None:
    """Return the special ids before and after the decoder's text; None if the checkpoint names no start token."""
    start = config.decoder_start_id
    if start is None:
        return None
    prefix = prefix if config.forced_bos_id is None else (config.forced_bos_id,)
    # The prefix of some tokenizers begins with the decoder's start token already.
    prefix = prefix[1:] if prefix[:1] == (start,) else prefix
    return PrefixSuffix((start, *prefix), (config.eos_ids[0] if config.eos_ids else eos,))


def copy_files(source: Path, target: Path) -> None:
    """Copy the tokenizer files, chat template and generation settings of a checkpoint unchanged.

    Args:
        source: the folder of the checkpoint.
        target: an empty folder.
    """
    for name in (*TOKENIZER_FILES, *_OTHER_FILES):
        if (source / name).is_file():
            shutil.copyfile(file_inside(source, name), target / name)


def find_variant(
    config: Mapping[str, Any], module: Transformer, task: TaskRecord, unused: Mapping[str, Tensor], *, pad: int
) -> LoadedModule | None:
    """Find the transformers class of a checkpoint's family that can compute a module; None if there is none.

    Args:
        config: the config.json of the checkpoint that the module came from.
        module: the module.
        task: the task of the module's outputs.
        unused: the tensors of the checkpoint that its class does not use.
        pad: the padding id, by which classes for classification find the end of a text.
    """
    family = registry.find_family(config)
    task_config = {key: value for key, value in config.items() if key not in ("architectures", "problem_type")}
    task_config |= label_config(task)
    if find_task(task.kind).outputs == "labels" and task_config.get("pad_token_id") in (None, -1):
        task_config["pad_token_id"] = pad
    variants = sorted(family.variants, key=lambda variant: variant.task != task.kind)
    stacks = module
    if find_task(task.kind).outputs == "vector" and makes_vectors(module.spec):
        # No class contains the pooling: other files of the folder describe it.
        stacks, variants = with_head(module, None, {}), [registry.headless_variant(family)]
    variant = next((variant for variant in variants if _is_expressible(family, variant, task_config, stacks)), None)
    if variant is None:
        return None
    named = config.get("architectures") or []
    classes = named if named and named[0] in variant.classes else [variant.classes[0]]
    tensors = {name: tensor for name, tensor in unused.items() if variant.leaves_unused(name)}
    prefix = family.prefix_to_save(variant)
    return LoadedModule(module, task, {**task_config, "architectures": classes}, family, variant, prefix, (), tensors)


def label_config(task: TaskRecord) -> dict[str, Any]:
    """Return the keys of config.json that describe the labels of a task."""
    if find_task(task.kind).outputs == "span":
        # Classes for question answering take the number of their scores, two, from the labels of the config.
        return configs.label_names(("LABEL_0", "LABEL_1"))
    if not find_task(task.kind).has_labels:
        return {}
    names = configs.label_names(task.labels or ("LABEL_0",))
    return names if task.label_kind is None else names | {"problem_type": _PROBLEM_TYPES[task.label_kind]}


def _is_expressible(family: Family, variant: Variant, config: Mapping[str, Any], module: Transformer) -> bool:
    """Return whether the class has a config for the module's spec, or `config` describes it except for dropout."""
    try:
        parsed = configs.parse(family, config)
        if not parsed.faults and not configs.differences(family.spec_of(parsed.values, variant), module.spec):
            return True
        configs.to_config(family, variant, module.spec)
    except InputError:
        return spec_up_to_dropout(family, variant, config, module) is not None
    return True


def spec_up_to_dropout(
    family: Family, variant: Variant, config: Mapping[str, Any], module: Transformer
) -> Model | None:
    """Return the spec that a config describes if it differs from a module's spec in dropout alone, else None."""
    try:
        expressed = family.spec_of(configs.parse(family, config).values, variant)
    except InputError:
        return None
    differing = configs.differences(expressed, module.spec)
    return expressed if all(".dropout: " in line for line in differing) else None


def task_kind(folder: Path) -> str:
    """Return the task of a checkpoint, without loading its weights.

    Raises:
        InputError: the family or the class is not known.
    """
    config = read_config(folder)
    return registry.choose_variant(registry.find_family(config), config, frozenset(TensorFiles(folder))).task
