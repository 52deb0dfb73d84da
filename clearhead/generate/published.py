"""A published checkpoint whole: its module, its tokenizers, and what its files say about generation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.generate.candidate import Candidate
from clearhead.generate.engine import translate_ids
from clearhead.generate.options import SearchOptions
from clearhead.generate.rules import GenerationRules
from clearhead.generate.text import Reading, check_rules
from clearhead.task import TaskRecord
from clearhead.text import PublishedText, TokenizerPair, load_published
from clearhead.text.documents import has_tokenizer
from clearhead.text.files import read_json_object
from clearhead.text.frame import Frame
from clearhead.text.roles import Roles
from clearhead.weights import Pretrained, load_pretrained, save_pretrained

SETTINGS = "generation_config.json"
# What belongs to a tokenizer or to generation, and is copied as it is when a checkpoint is saved again.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "target_vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model",
    "tokenizer.model", "sentencepiece.model", "source.spm", "target.spm", "chat_template.jinja", SETTINGS,
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """What a checkpoint's folder holds.

    Args:
        folder: where it was read.
        text: how it turns text into ids and back.
        rules: what its files say about generation.
        pretrained: its weights and configuration.
    """

    folder: Path
    text: PublishedText
    rules: GenerationRules
    pretrained: Pretrained

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
        return cls(folder, text, rules, pretrained)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of generation: what is given, and for the rest what the files say.

        Args:
            given: options by name, without those that were left out.
        """
        asked = self.rules.options_with(given)
        if self.rules.max_length is not None:
            asked.setdefault("max_new_tokens", self.rules.max_length)
        if self.pretrained.module.encoder is not None and self.rules.min_length > 1:
            # The bound counts the start token.
            shortest = self.rules.min_length - 1
            asked.setdefault("min_new_tokens", min(shortest, asked.get("max_new_tokens", shortest)))
        return asked

    def search_options(self) -> dict[str, Any]:
        """Return what the files say about a search for translations, by the names of its options."""
        said = {name: self.rules.options[name] for name in ("beam_size",) if name in self.rules.options}
        said["length_penalty"] = float(self.rules.options.get("length_penalty", 1.0))
        if self.rules.max_length is not None and self.rules.max_length > 1:
            # The bound counts the start token.
            most = self.pretrained.module.max_positions
            said["max_length"] = self.rules.max_length - 1 if most is None else min(self.rules.max_length - 1, most)
        return said

    def reading(self, *, chat: bool, asked: int | None) -> Reading:
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
        return Reading(rules, self.text.chat if chat else None)

    def translate(
        self, encoded: Sequence[Sequence[int]], options: SearchOptions, source: str | None, target: str | None
    ) -> list[list[Candidate]]:
        """Search for translations.

        Args:
            encoded: plain ids of the texts, none empty.
            options: how to search.
            source, target: codes of languages, as in `between`.

        Raises:
            InputError: as `between`; or the files say nothing about where a decoder starts, or ask for what is not
                done here.
        """
        frame, rules = self.between(source, target)
        check_rules(rules, needs_start=True)
        assert rules.start is not None
        pair = self.text.tokenizers
        return translate_ids(
            self.pretrained.module,
            [ids if frame is None else frame.around(ids)[0] for ids in encoded],
            bos_id=rules.start,
            eos_id=rules.ends[0] if rules.ends else pair.target.eos_id,
            pad_id=pair.source.pad_id if rules.pad is None else rules.pad,
            options=options,
            rules=rules,
        )

    @property
    def _starts_in_language(self) -> bool:
        return self.rules.start in self.text.languages.values()

    def check_frame(self, *, paired: bool) -> None:
        """Refuse texts around which the checkpoint's tokenizer puts something else than [start] A [end] (B [end]).

        Args:
            paired: the texts are pairs.

        Raises:
            InputError: what reads such texts here would read them in another form than the checkpoint was trained on.
        """
        source = self.text.tokenizers.source
        roles, frame = source.roles, source.frame
        single = ((roles.bos, 0), ("A", 0), (roles.eos, 0))
        second = 1 if frame is not None and frame.pair is not None and frame.pair[-1][1] else 0
        pair = (*single, ("B", second), (roles.eos, second))
        expected, found = (pair, frame and frame.pair) if paired else (single, frame and frame.single)
        if found != expected:
            what = "pairs of texts" if paired else "texts"
            raise InputError(f"the checkpoint reads {what} in a form that this task does not support yet")

    def between(self, source: str | None, target: str | None) -> tuple[Frame | None, GenerationRules]:
        """Return what stands around a source, and the rules for its target, for two languages.

        Args:
            source, target: codes of languages; None where the model has none, or for the one that its files name.

        Raises:
            InputError: a language is missing, not known, or not wanted.
        """
        text, frame = self.text, self.text.tokenizers.source.frame
        given = [code for code in (source, target) if code is not None]
        if not text.languages:
            if given:
                raise InputError(f"the model has no language codes, so '{given[0]}' has no effect: leave it out")
            return frame, self.rules
        is_framed = frame is not None and any(
            part in text.languages.values() for part, _ in frame.single if not isinstance(part, str)
        )
        known = ", ".join(text.languages)
        if source is None and not is_framed:
            raise InputError(f"the model reads several languages: say which one the text is in; it has: {known}")
        if target is None and self.rules.first is None and not (text.language_is_start and self._starts_in_language):
            raise InputError(f"the model writes several languages: say which one you want; it has: {known}")
        frame = frame if source is None else text.frame_for(source)
        if target is None:
            return frame, self.rules
        index = text.language_id(target)
        if text.language_is_start:
            return frame, replace(self.rules, start=index)
        return frame, replace(self.rules, first=index)


def read_rules(folder: Path) -> GenerationRules:
    """Read what a checkpoint's files say about generation: generation_config.json, else the same keys of config.json.

    Raises:
        InputError: a file is no JSON object, or holds values of a wrong type.
    """
    config = read_json_object(folder / "config.json", what="a config.json")
    path = folder / SETTINGS
    if not path.is_file():
        return GenerationRules.of(config, source=str(folder / "config.json"))
    settings = read_json_object(path, what="a generation_config.json")
    # Ids of special tokens that the settings leave out are those of the model.
    ids = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    inherited = {key: config[key] for key in ids if key in config and settings.get(key) is None}
    return GenerationRules.of({**settings, **inherited}, source=str(path))


def save_published(
    module: Transformer, folder: Path, tokenizers: TokenizerPair, task: TaskRecord, published: Published | None
) -> str:
    """Write a model in the layout of the Hugging Face hub.

    Args:
        module: whose weights are written.
        folder: an empty one.
        tokenizers: of the model.
        task: what its outputs are for.
        published: the checkpoint that it was; None: a model that was trained here.

    Returns:
        The family that was written.

    Raises:
        InputError: no family can say the model, or it has a tokenizer for each side.
    """
    if published is not None:
        record = save_pretrained(module, folder, pretrained=published.pretrained, task=task)
        for name in _COPIED:
            if (published.folder / name).is_file():
                shutil.copyfile(published.folder / name, folder / name)
        return record.model_type
    if not tokenizers.joint:
        raise InputError(
            "source and target have a tokenizer each, for which the layout has no place: train with joint = true"
        )
    record = save_pretrained(module, folder, task=task)
    tokenizers.source.save(folder / "tokenizer.json")
    _write_template(folder / "tokenizer.json", module, tokenizers.source.roles)
    _write_settings(folder / SETTINGS, module, tokenizers.target.roles)
    return record.model_type


def _write_template(path: Path, module: Transformer, roles: Roles) -> None:
    """Put into a tokenizer.json what our models read around a text, so that others do the same."""
    document = read_json_object(path, what="a tokenizer.json")
    entries = {token["id"]: token["content"] for token in document["added_tokens"]}
    start = [] if module.encoder is not None and module.decoder is not None else [roles.bos]
    end = [] if module.encoder is None else [roles.eos]
    around = [*_specials(start, entries), {"Sequence": {"id": "A", "type_id": 0}}, *_specials(end, entries)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, *_specials(end, entries, 1)]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": around,
        "pair": [*around, *second],
        "special_tokens": {
            entries[index]: {"id": entries[index], "ids": [index], "tokens": [entries[index]]}
            for index in {*start, *end}
        },
    }
    path.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    config_path = path.with_name("tokenizer_config.json")
    config = read_json_object(config_path, what="a tokenizer_config.json")
    del config["clearhead"]
    config_path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _specials(ids: list[int], entries: dict[int, str], segment: int = 0) -> list[dict[str, Any]]:
    return [{"SpecialToken": {"id": entries[index], "type_id": segment}} for index in ids]


def _write_settings(path: Path, module: Transformer, roles: Roles) -> None:
    if module.decoder is None:
        return
    settings: dict[str, Any] = {"bos_token_id": roles.bos, "eos_token_id": roles.eos, "pad_token_id": roles.pad}
    # Start and padding are no text: our own generation never gives them.
    settings["suppress_tokens"] = sorted({roles.bos, roles.pad} - {roles.eos})
    if module.encoder is not None:
        settings["decoder_start_token_id"] = roles.bos
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
