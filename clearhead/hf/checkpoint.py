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
from clearhead.hf import config as configs
from clearhead.hf import registry
from clearhead.hf.folder import TensorFiles
from clearhead.hf.loading import Pretrained, load_pretrained
from clearhead.hf.pooling import makes_vectors, with_head
from clearhead.hf.record import Record, Variant
from clearhead.hf.token_role_defaults import ROLE_IDS
from clearhead.hf.tokenizers import PublishedText, load_published
from clearhead.spec import Model
from clearhead.task import TaskKind, TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import Around, Frame
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
class Published:
    """What a checkpoint's folder holds beside its weights.

    Args:
        folder: where it was read.
        text: how it turns text into ids and back.
        rules: what its files say about generation.
        config: config.json as it was read.
        pretrained: the family as which the model is written; None: its family cannot say it any more.
    """

    folder: Path
    text: PublishedText
    rules: GenerationConfig
    config: Mapping[str, Any]
    pretrained: Pretrained | None

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype | None = None) -> Published:
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
        rules = read_rules(folder)
        text = load_published(folder)
        pretrained = load_pretrained(folder, dtype=dtype)
        return cls(folder, framed_text(text, rules, pretrained.module), rules, pretrained.config, pretrained)

    def replaced(self, module: Transformer, task: TaskRecord, tokenizers: TokenizerPair | None = None) -> Published:
        """Return the same for another module, such as one that was trained further.

        Args:
            module: the module.
            task: what its outputs are for.
            tokenizers: of the module; None: the same.
        """
        spare = {} if self.pretrained is None else self.pretrained.spare
        text = self.text if tokenizers is None else replace(self.text, tokenizers=tokenizers)
        pad = text.tokenizers.source.pad_id
        return replace(self, text=text, pretrained=family_of(self.config, module, task, spare, pad=pad))

    def options(self, given: Mapping[str, Any], module: Transformer) -> dict[str, Any]:
        """Return the options of generation: what is given, and for the rest what the files say.

        Args:
            given: options by name, without those that were left out.
            module: of the model.
        """
        asked = self.rules.options_with(given)
        if self.rules.max_length is not None:
            asked.setdefault("max_new_tokens", self.rules.max_length)
        if module.encoder is not None and self.rules.min_length > 1:
            # The bound counts the start token.
            shortest = self.rules.min_length - 1
            asked.setdefault("min_new_tokens", min(shortest, asked.get("max_new_tokens", shortest)))
        return asked

    def search_options(self, module: Transformer) -> dict[str, Any]:
        """Return what the files say about a search for translations, by the names of its options."""
        rules, own = self.rules, self.rules.options
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

    def for_task(self, task: str) -> tuple[Published, str]:
        """Return the checkpoint with its settings for a task, and what it puts in front of a text then.

        Args:
            task: a name that config.json lists, or the prefix of one.

        Raises:
            InputError: the files list no such task.
        """
        prefixes = self.rules.task_prefixes
        known = "; ".join(f"{name} ('{prefix.strip()}')" for name, prefix in prefixes.items())
        if not prefixes:
            raise InputError("the checkpoint lists no tasks: write the prefix into the prompt, and leave the task out")
        name = next((one for one, prefix in prefixes.items() if task in (one, prefix, prefix.strip())), None)
        if name is None:
            raise InputError(f"the checkpoint lists no task '{task}'{nearest(task, prefixes)}; it lists: {known}")
        return replace(self, rules=read_rules(self.folder, name)), prefixes[name]

    def reading(self, *, chat: bool, asked: int | None) -> PromptFormat:
        """Return how prompts are read.

        Args:
            chat: a prompt is a message.
            asked: how many tokens the caller wants; None: as many as the files say.

        Raises:
            InputError: there is no chat template.
        """
        if chat and self.text.chat is None:
            raise InputError("the checkpoint has no chat template: leave chat out")
        own = asked is None and "max_new_tokens" not in self.rules.options
        rules = self.rules if own else replace(self.rules, max_length=None)
        return PromptFormat(rules, self.text.chat if chat else None)

    def between(self, source: str | None, target: str | None) -> tuple[Frame, GenerationConfig]:
        """Return what stands around a source and what its decoder writes, and the rules for that, for two languages.

        Args:
            source, target: codes of languages; None where the model has none, or for the one that its files name.

        Raises:
            InputError: a language is missing, not known, or not wanted.
        """
        text, (read, said) = self.text, (self.text.tokenizers.source.frame, self.text.tokenizers.target.frame)
        given = [code for code in (source, target) if code is not None]
        if not text.languages:
            if given:
                raise InputError(f"the model has no language codes, so '{given[0]}' has no effect: leave it out")
            return replace(read, written=said.written), self.rules
        ids, known = set(text.languages.values()), ", ".join(text.languages)
        if source is None and ids.isdisjoint((*read.read.front, *read.read.behind)):
            raise InputError(f"the model reads several languages: say which one the text is in; it has: {known}")
        # A run that trained between two languages has the second in what its decoder writes.
        own = said.written if said.written is not None and not ids.isdisjoint(said.written.front) else None
        if target is None and self.rules.forced_bos_id is None and own is None:
            raise InputError(f"the model writes several languages: say which one you want; it has: {known}")
        rules = self.rules
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
                decoder_start_id=own.front[0],
                forced_bos_id=own.front[1] if len(own.front) > 1 else rules.forced_bos_id,
            )
        frame = read if source is None else text.frame_for(source)
        return replace(frame, written=_written_behind_encoder(rules, (), text.tokenizers.target.eos_id)), rules

    def for_languages(self, source: str | None, target: str | None) -> Published:
        """Return the checkpoint as one that reads one language and writes another.

        Args:
            source, target: as for `between`.

        Raises:
            InputError: as for `between`.
        """
        frame, _ = self.between(source, target)
        pair = self.text.tokenizers
        one = pair.source.with_frame(frame)
        tokenizers = TokenizerPair(one, one if pair.joint else pair.target.with_frame(frame), pair.joint)
        return replace(self, text=replace(self.text, tokenizers=tokenizers))


def framed_text(text: PublishedText, rules: GenerationConfig, module: Transformer) -> PublishedText:
    """Return the text side of a checkpoint with what its decoder writes around texts.

    Args:
        text: as its tokenizer's files have it, which know nothing of the model.
        rules: what its files say about generation.
        module: of the checkpoint.
    """
    pair = text.tokenizers
    frame = pair.target.frame
    if module.decoder is None:
        return text
    if module.encoder is None:
        opening = pair.target.bos_id if rules.bos_id is None else rules.bos_id
        end = rules.eos_ids[0] if rules.eos_ids else pair.target.eos_id
        # A text begins where another one could have ended, if its tokenizer puts nothing in front of it.
        written: Around | None = Around(frame.start or (opening,), (end,))
    else:
        # The language in front of what is read is not the one that is written.
        prefix = () if text.languages else frame.start
        written = _written_behind_encoder(rules, prefix, pair.target.eos_id)
    if written is None:
        return text
    target = pair.target.with_frame(frame.completed(written=written))
    return replace(text, tokenizers=TokenizerPair(target if pair.joint else pair.source, target, pair.joint))


def _written_behind_encoder(rules: GenerationConfig, prefix: tuple[int, ...], eos: int) -> Around | None:
    """Return what a decoder behind an encoder writes around a text; None where the files do not say."""
    if rules.decoder_start_id is None:
        return None
    front = prefix if rules.forced_bos_id is None else (rules.forced_bos_id,)
    # Some tokenizers put in front of a text what is the decoder's start already.
    front = front[1:] if front[:1] == (rules.decoder_start_id,) else front
    return Around((rules.decoder_start_id, *front), (rules.eos_ids[0] if rules.eos_ids else eos,))


def family_of(
    config: Mapping[str, Any], module: Transformer, task: TaskRecord, spare: Mapping[str, Tensor], *, pad: int
) -> Pretrained | None:
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
    said |= labels_in_config(task)
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
    kept = {name: one for name, one in spare.items() if any(re.fullmatch(pattern, name) for pattern in variant.spare)}
    prefix = "" if variant.is_bare else record.prefix_of(variant)
    return Pretrained(module, task, {**said, "architectures": classes}, record, variant, prefix, (), kept)


def labels_in_config(task: TaskRecord) -> dict[str, Any]:
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


def _can_say(record: Record, variant: Variant, config: Mapping[str, Any], module: Transformer) -> bool:
    """Say whether a class of a family can be this module: as its config says it, or as another config would."""
    try:
        reading = configs.read(record, config)
        if not reading.faults and not configs.differences(record.whole(reading.values, variant), module.spec):
            return True
        configs.write(record, variant, module.spec)
    except InputError:
        return sayable(record, variant, config, module) is not None
    return True


def sayable(record: Record, variant: Variant, config: Mapping[str, Any], module: Transformer) -> Model | None:
    """Return the spec that a config says, if a module differs from it in dropout alone, which computes nothing."""
    try:
        said = record.whole(configs.read(record, config).values, variant)
    except InputError:
        return None
    differing = configs.differences(said, module.spec)
    return said if all(".dropout: " in line for line in differing) else None


def kind_of(folder: Path) -> TaskKind:
    """Return what the outputs of a checkpoint are for, without its weights.

    Raises:
        InputError: a family or a class that is not known.
    """
    config = read_json_object(folder / "config.json", what="a config.json")
    return registry.variant(registry.find(config), config, frozenset(TensorFiles(folder))).task


def read_rules(folder: Path, task: str | None = None) -> GenerationConfig:
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
