"""Tokenizers of a checkpoint, with their special tokens, languages and chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clearhead.base.errors import InputError, did_you_mean
from clearhead.text.backend import backend_of
from clearhead.text.chat import ChatTemplate
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import SpecialTokens, TemplateItem, read_special_tokens
from clearhead.text.token_roles import TokenRoles, content_of, find_roles
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_classes import Template, TokenizerClass
from clearhead.text.tokenizer_files import TokenizerFiles, read_files


@dataclass(frozen=True)
class CheckpointTokenizers:
    """Tokenizers of a checkpoint.

    Args:
        pair: the tokenizers of source and target, each with its special tokens.
        chat: the chat templates. None means that there are none.
        languages: the id of each language code; empty if texts have no language token.
        max_length: `model_max_length` in tokens, with special tokens. None means unknown.
        templates: the templates for single texts and for pairs. None means that they contain no language.
        language_is_start: True if the language token replaces the start token of a target; False if it follows.
    """

    pair: TokenizerPair
    chat: ChatTemplate | None = None
    languages: Mapping[str, int] = field(default_factory=dict)
    max_length: int | None = None
    templates: tuple[Template, Template] | None = None
    language_is_start: bool = False

    def special_tokens_for(self, language: str) -> SpecialTokens:
        """Return the special tokens of a text in a language.

        Raises:
            InputError: the checkpoint does not have the language.
        """
        assert self.templates is not None, "only a checkpoint with languages has special tokens for a language"
        named, roles = {"language": self.language_id(language)}, self.pair.source.roles
        single, pair = (_fill_template(template, roles, named) for template in self.templates)
        return SpecialTokens(single, pair)

    def language_id(self, language: str) -> int:
        """Return the id of a language.

        Raises:
            InputError: the checkpoint does not have the language.
        """
        if language not in self.languages:
            known = ", ".join(self.languages) or "none"
            hint = did_you_mean(language, self.languages)
            raise InputError(f"the model has no language '{language}'{hint}; it has: {known}")
        return self.languages[language]


def load_tokenizers(folder: Path) -> CheckpointTokenizers:
    """Load the tokenizers of a checkpoint.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        InputError: files are missing, cannot be used, or contradict each other.
    """
    files = read_files(folder)
    source = _load_tokenizer(folder, files, files.document)
    target = source if files.target is None else _load_tokenizer(folder, files, files.target)
    longest = files.config.get("model_max_length")
    # A tokenizer without a limit has a huge number.
    limit = int(longest) if isinstance(longest, int | float) and 0 < longest < 2**31 else None
    known = files.tokenizer_class
    languages = {} if known is None else _read_languages(files, known)
    return CheckpointTokenizers(
        pair=TokenizerPair(source, target, joint=files.target is None),
        chat=ChatTemplate.read(folder, files.config),
        languages=languages,
        max_length=limit,
        templates=_choose_templates(files, known) if languages and known is not None else None,
        language_is_start=known is not None and known.language_is_start,
    )


def _load_tokenizer(folder: Path, files: TokenizerFiles, document: Mapping[str, Any]) -> Tokenizer:
    roles = find_roles(folder, backend_of(document), files.config, {})
    metadata = files.config.get("clearhead") or {}
    special_tokens = None if metadata else _read_special_tokens(folder, files, document, roles)
    return Tokenizer(document, kind=metadata.get("kind", "pretrained"), roles=roles, special_tokens=special_tokens)


def _read_special_tokens(
    folder: Path, files: TokenizerFiles, document: Mapping[str, Any], roles: TokenRoles
) -> SpecialTokens:
    """Return the special tokens from tokenizer.json, or from the tokenizer class if the configuration decides them."""
    known, config = files.tokenizer_class, files.config
    has_document = (folder / "tokenizer.json").is_file()
    named = _role_ids(backend_of(document).vocabulary(), config)
    switches = {
        role: config[key] for role, key in (("bos", "add_bos_token"), ("eos", "add_eos_token")) if key in config
    }
    # The template of the file stays, unless the configuration switches BOS or EOS on or off.
    if has_document and not (known is not None and _has_language(known)) and not switches:
        return read_special_tokens(document)
    if known is None or known.adds_start is not None or known.adds_end is not None:
        if has_document and _has_other_tokens(read_special_tokens(document), named):
            return read_special_tokens(document)
        starts = switches.get("bos", known is not None and known.adds_start)
        ends = switches.get("eos", known is not None and known.adds_end)
        start, end = ("bos",) if starts and "bos" in named else (), ("eos",) if ends and "eos" in named else ()
        single, pair = (*start, "A", *end), (*start, "A", *end, *start, "B", *end)
        return SpecialTokens(_fill_template(single, roles, named), _fill_template(pair, roles, named, 1))
    if has_document and not _has_language(known):
        return read_special_tokens(document)
    if "language" in known.single:
        named |= _read_source_language(files, known, document)
    single, pair = _choose_templates(files, known)
    second = int(known.second_segment)
    return SpecialTokens(
        _fill_template(single, roles, named), _fill_template(pair, roles, named, second) if "B" in pair else None
    )


def _has_other_tokens(special_tokens: SpecialTokens, named: Mapping[str, int]) -> bool:
    """Return whether there are special tokens besides BOS and EOS, for which the configuration has no switch."""
    ends = {named.get("bos"), named.get("eos")}
    return any(item not in ends for item in (*special_tokens.prefix, *special_tokens.suffix))


def _role_ids(entries: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each special token that the configuration names: bos, eos, cls and sep."""
    texts = {role: content_of(config.get(f"{role}_token")) for role in ("bos", "eos", "cls", "sep")}
    return {role: entries[text] for role, text in texts.items() if text is not None and text in entries}


def _fill_template(
    template: Template, roles: TokenRoles, named: Mapping[str, int], second: int = 0
) -> tuple[TemplateItem, ...]:
    """Return a template with ids in place of names; the second text and the tokens after it have segment `second`."""
    known = {"bos": roles.bos, "eos": roles.eos, "cls": roles.bos, "sep": roles.eos} | dict(named)
    parts: list[TemplateItem] = []
    segment = 0
    for name in template:
        segment = second if name == "B" else segment
        if name in ("A", "B"):
            parts.append(("A" if name == "A" else "B", segment))
        elif name in known:
            parts.append((known[name], segment))
    return tuple(parts)


def _has_language(known: TokenizerClass) -> bool:
    return "language" in known.single or bool(known.languages)


def _choose_templates(files: TokenizerFiles, known: TokenizerClass) -> tuple[Template, Template]:
    if known.legacy_single and files.config.get("legacy_behaviour") is True:
        return known.legacy_single, known.legacy_single
    return known.single, known.pair


def _read_languages(files: TokenizerFiles, known: TokenizerClass) -> dict[str, int]:
    """Return the ids of the languages of the tokenizer class; if it has none, of those that the configuration adds."""
    if not _has_language(known):
        return {}
    entries = backend_of(files.document).vocabulary()
    codes = {code: known.language_form.format(code) for code in known.languages}
    if not codes:
        extra = files.config.get("extra_special_tokens") or files.config.get("additional_special_tokens") or ()
        codes = {text: text for token in extra if (text := content_of(token)) is not None}
    return {code: entries[entry] for code, entry in codes.items() if entry in entries}


def _read_source_language(files: TokenizerFiles, known: TokenizerClass, document: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of the source language in the configuration; empty if it names none."""
    code = files.config.get("src_lang")
    entries = backend_of(document).vocabulary() if isinstance(code, str) else {}
    entry = known.language_form.format(code)
    return {"language": entries[entry]} if entry in entries else {}
