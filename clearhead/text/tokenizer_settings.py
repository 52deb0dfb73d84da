"""The types of what tokenizer files say: each key that is read, with its range; other keys are left as they are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from clearhead.text.token_roles import TokenRoles
from clearhead.text.tokenizer_checks import MOST_PARTS

Id = Annotated[int, Field(ge=0, lt=2**31)]
Part = tuple[Id | Literal["A", "B"], Annotated[int, Field(ge=0, lt=2**15)]]
IdList = Annotated[list[Id], Field(max_length=MOST_PARTS)]
Parts = Annotated[tuple[Part, ...], Field(max_length=MOST_PARTS)]


class _Token(BaseModel):
    content: str


class _AddedToken(_Token):
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class _NamedTemplate(BaseModel):
    name: str
    template: str


class SavedSpecialTokens(BaseModel):
    """The special tokens of a tokenizer that was saved here."""

    single: Parts
    pair: Parts | None
    source: tuple[IdList, IdList] | None = None
    target: tuple[IdList, IdList] | None = None


class _Own(BaseModel):
    kind: str = "pretrained"
    fingerprint: str | None = None
    special_tokens: SavedSpecialTokens | None = None
    roles: TokenRoles | None = None


class TokenizerConfig(BaseModel):
    """A `tokenizer_config.json`, with what older files add to it."""

    clearhead: _Own | None = None
    tokenizer_class: str | None = None
    pad_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    additional_special_tokens: list[str | _Token] | None = None
    extra_special_tokens: list[str | _Token] | dict[str, Any] | None = None
    added_tokens_decoder: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], _AddedToken] | None = None
    extra_ids: Annotated[int, Field(ge=0, le=10_000)] = 0
    model_max_length: int | float | None = None
    src_lang: str | None = None
    language_codes: str | None = None
    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None
    do_basic_tokenize: bool = True
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    legacy_behaviour: bool | None = None
    separate_vocabs: bool | None = None
    split_by_punct: bool | None = None
    sp_model_kwargs: dict[str, Any] | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _AddedTokenWithId(_AddedToken):
    id: Id


class TokenizerDocument(BaseModel):
    """What is read from a `tokenizer.json` here; the rest is checked by the library that runs it."""

    added_tokens: list[_AddedTokenWithId] | None = None


class PiecesDocument(BaseModel):
    """A `tokenizer.json` that holds a SentencePiece model and the ids of its pieces."""

    model: str
    added: dict[str, Id]
    special: list[str]
    unknown: str
    vocabulary: dict[str, Id] | None = None
    front: list[str] = []
    skip: Id = 0
    codes: bool = False
