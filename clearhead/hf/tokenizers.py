"""The text side of a published checkpoint: its tokenizers, what stands around texts, its languages and its chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clearhead.errors import InputError, nearest
from clearhead.text.chat import ChatTemplate
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import Part, SpecialTokens, read_special_tokens
from clearhead.text.token_roles import TokenRoles, content_of, find_roles
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_classes import Template, TokenizerClass
from clearhead.text.tokenizer_files import Files, backend_of, read_files

_PRETRAINED = "pretrained"


@dataclass(frozen=True)
class CheckpointTokenizers:
    """How a checkpoint turns text into ids and back.

    Args:
        tokenizers: of what it reads and of what it writes, each with its special_tokens.
        chat: how chats are written out; None where it has no template.
        languages: the id of each language code; empty where texts have none.
        max_length: `model_max_length`, in tokens with special ones; None: not said.
        templates: the special_tokens's words for single texts and for pairs, where a language belongs into them.
        language_is_start: what is written begins with its language in place of the start token, not behind it.
    """

    pair: TokenizerPair
    chat: ChatTemplate | None = None
    languages: Mapping[str, int] = field(default_factory=dict)
    max_length: int | None = None
    templates: tuple[Template, Template] | None = None
    language_is_start: bool = False

    def special_tokens_for(self, language: str) -> SpecialTokens:
        """Return what stands around a text in some language.

        Raises:
            InputError: a language that the checkpoint does not have.
        """
        assert self.templates is not None, "only a checkpoint with languages is asked"
        index = self.language_id(language)
        source = self.pair.source
        single, pair = self.templates
        return SpecialTokens(
            _parts(single, source.roles, {"language": index}), _parts(pair, source.roles, {"language": index})
        )

    def language_id(self, language: str) -> int:
        """Return the id of a language.

        Raises:
            InputError: a language that the checkpoint does not have.
        """
        if language not in self.languages:
            known = ", ".join(self.languages) or "none"
            hint = nearest(language, self.languages)
            raise InputError(f"the model has no language '{language}'{hint}; it has: {known}")
        return self.languages[language]


def load_tokenizers(folder: Path) -> CheckpointTokenizers:
    """Load the text side of a checkpoint.

    Args:
        folder: in the layout of the Hugging Face hub.

    Raises:
        InputError: files are missing or unusable, or say different things.
    """
    files = read_files(folder)
    source = _tokenizer(folder, files, files.document)
    target = source if files.target is None else _tokenizer(folder, files, files.target)
    longest = files.config.get("model_max_length")
    # A checkpoint without a limit writes a number beyond any text in its place.
    limit = int(longest) if isinstance(longest, int | float) and 0 < longest < 2**31 else None
    languages = _languages(files)
    templates = _with_language(files) if languages else None
    return CheckpointTokenizers(
        pair=TokenizerPair(source, target, joint=files.target is None),
        chat=ChatTemplate.read(folder, files.config),
        languages=languages,
        max_length=limit,
        templates=templates,
        language_is_start=files.record is not None and files.record.language_is_start,
    )


def _tokenizer(folder: Path, files: Files, document: Mapping[str, Any]) -> Tokenizer:
    backend = backend_of(document)
    roles = find_roles(folder, backend, files.config, {})
    own = files.config.get("clearhead") or {}
    kind = own.get("kind", _PRETRAINED)
    special_tokens = _special_tokens(folder, files, document, roles) if not own else None
    return Tokenizer(document, kind=kind, roles=roles, special_tokens=special_tokens)


def _special_tokens(folder: Path, files: Files, document: Mapping[str, Any], roles: TokenRoles) -> SpecialTokens:
    """Return what stands around texts: what the file says, but for classes whose template the configuration decides."""
    record, config = files.record, files.config
    has_own_document = (folder / "tokenizer.json").is_file()
    named = _named(backend_of(document).vocabulary(), config)
    says = {name: config[key] for name, key in (("bos", "add_bos_token"), ("eos", "add_eos_token")) if key in config}
    # A template that the file holds is kept, unless the configuration says which ends it has.
    if has_own_document and not (record is not None and _has_language(record)) and not says:
        return read_special_tokens(document)
    if record is None or record.adds_start is not None or record.adds_end is not None:
        if has_own_document and _is_rich(read_special_tokens(document), named):
            return read_special_tokens(document)
        starts = says.get("bos", record.adds_start if record is not None else False)
        ends = says.get("eos", record.adds_end if record is not None else False)
        start, end = ("bos",) if starts and "bos" in named else (), ("eos",) if ends and "eos" in named else ()
        return SpecialTokens(
            _parts((*start, "A", *end), roles, named), _parts((*start, "A", *end, *start, "B", *end), roles, named, 1)
        )
    if has_own_document and not _has_language(record):
        return read_special_tokens(document)
    single, pair = record.single, record.pair
    if "language" in single:
        named |= _spoken(files, document)
    if record.legacy_single and config.get("legacy_behaviour") is True:
        single = pair = record.legacy_single
    return SpecialTokens(
        _parts(single, roles, named), _parts(pair, roles, named, int(record.second_segment)) if "B" in pair else None
    )


def _is_rich(special_tokens: SpecialTokens, named: Mapping[str, int]) -> bool:
    """Whether there are other special tokens than BOS and EOS, which the configuration's switches do not cover."""
    ends = {named.get("bos"), named.get("eos")}
    return any(part not in ends for part in (*special_tokens.prefix, *special_tokens.suffix))


def _named(entries: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each role that the configuration names."""
    texts = {role: content_of(config.get(f"{role}_token")) for role in ("bos", "eos", "cls", "sep")}
    return {role: entries[text] for role, text in texts.items() if text is not None and text in entries}


def _parts(template: Template, roles: TokenRoles, named: Mapping[str, int], second: int = 0) -> tuple[Part, ...]:
    """Return a template with ids for its words; the second text and what is behind it are of the segment `second`."""
    known = {"bos": roles.bos, "eos": roles.eos, "cls": roles.bos, "sep": roles.eos} | dict(named)
    parts: list[Part] = []
    segment = 0
    for word in template:
        segment = second if word == "B" else segment
        if word in ("A", "B"):
            parts.append(("A" if word == "A" else "B", segment))
        elif word in known:
            parts.append((known[word], segment))
    return tuple(parts)


def _has_language(record: TokenizerClass) -> bool:
    return "language" in record.single or bool(record.languages)


def _with_language(files: Files) -> tuple[Template, Template]:
    record = files.record
    assert record is not None, "languages come from a class that is known"
    if record.legacy_single and files.config.get("legacy_behaviour") is True:
        return record.legacy_single, record.legacy_single
    return record.single, record.pair


def _languages(files: Files) -> dict[str, int]:
    """Return the ids of the languages: those that the class knows, or those that the configuration adds."""
    record = files.record
    if record is None or not _has_language(record):
        return {}
    entries = backend_of(files.document).vocabulary()
    codes = {code: record.language_form.format(code) for code in record.languages}
    if not codes:
        extra = files.config.get("extra_special_tokens") or files.config.get("additional_special_tokens") or ()
        codes = {text: text for one in extra if (text := content_of(one)) is not None}
    return {code: entries[entry] for code, entry in codes.items() if entry in entries}


def _spoken(files: Files, document: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of the language that the configuration names for what is read, if it names one."""
    code = files.config.get("src_lang")
    record = files.record
    if not isinstance(code, str) or record is None:
        return {}
    entries = backend_of(document).vocabulary()
    entry = record.language_form.format(code)
    return {"language": entries[entry]} if entry in entries else {}
