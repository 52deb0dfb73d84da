"""Tokenizer classes: special tokens, ids and templates that are missing in older tokenizer files, as data.

A `tokenizer.json` is complete. Older files are not: a list of pieces has neither the ids of tokens that its framework
adds nor a template. For these files, the class in `tokenizer_config.json` is part of the format.

Source: the tokenizer classes of the transformers library 5.23, and the frameworks that wrote the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

FileKind = Literal["wordpiece", "byte-bpe", "pieces", "strings", "two-sided"]

# Items of a template: "A" and "B" are the texts, "language" is the language code of the text, all others are roles.
Template = tuple[str, ...]


@dataclass(frozen=True)
class TokenizerClass:
    """Data that a tokenizer class adds to its files.

    Args:
        file_kind: kind of the files without a `tokenizer.json`. A WordPiece vocabulary is "wordpiece", and byte-level
            BPE merges are "byte-bpe". A SentencePiece model is "pieces" if its piece numbers determine the ids, and
            "strings" if its pieces are looked up in a vocabulary. Two such models with one vocabulary are "two-sided".
        tokens: role -> token, for roles that the configuration may lack.
        single, pair: templates of one text and of a pair.
        second_segment: True if the second text and the tokens after it have segment 1.
        front: entries that replace the first pieces of the SentencePiece model.
        skip: number of pieces of the model that `front` replaces.
        last_entries: entries after the last piece.
        sentinels: number of sentinel tokens, which have the last ids; the first sentinel has the highest id.
        languages: language codes of the class, in the order of their ids.
        language_form: format of the entry of a language, with {} for its code.
        language_set: name of the set of language codes in the configuration.
        language_is_start: True if a target begins with its language code in place of the start token.
        legacy_single: template of one text if the configuration sets `legacy_behaviour`.
        prefix_space: default of `add_prefix_space`.
        lowers: default of `do_lower_case`.
        adds_start, adds_end: defaults of `add_bos_token` and `add_eos_token`. None means that these are ignored.
    """

    file_kind: FileKind
    tokens: Mapping[str, str] = field(default_factory=dict)
    single: Template = ("A",)
    pair: Template = ("A", "B")
    second_segment: bool = False
    front: tuple[str, ...] = ()
    skip: int = 0
    last_entries: tuple[str, ...] = ()
    sentinels: int = 0
    languages: tuple[str, ...] = ()
    language_form: str = "{}"
    language_set: str = ""
    language_is_start: bool = False
    legacy_single: Template = ()
    prefix_space: bool = False
    lowers: bool = True
    adds_start: bool | None = None
    adds_end: bool | None = None


_CLASSIC = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
_BRACKETS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")

_AROUND: Template = ("cls", "A", "sep")
_AROUND_TWO: Template = ("cls", "A", "sep", "B", "sep")
_AROUND_TWO_APART: Template = ("cls", "A", "sep", "sep", "B", "sep")

_LANGUAGES_25 = tuple(
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN".split()
)
_LANGUAGES_52 = _LANGUAGES_25 + tuple(
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN "
    "te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI".split()
)
_LANGUAGES_100 = tuple(
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu "
    "hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro "
    "ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu".split()
)

_BERT = TokenizerClass("wordpiece", _BRACKETS, _AROUND, _AROUND_TWO, second_segment=True)
_ROBERTA = TokenizerClass("byte-bpe", _CLASSIC, _AROUND, _AROUND_TWO_APART)
_GPT2 = TokenizerClass(
    "byte-bpe",
    {"unk": "<|endoftext|>", "bos": "<|endoftext|>", "eos": "<|endoftext|>"},
    adds_start=False,
    adds_end=False,
)
_T5 = TokenizerClass(
    "pieces",
    {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    ("A", "eos"),
    ("A", "eos", "B", "eos"),
    sentinels=100,
)
_LLAMA = TokenizerClass("pieces", {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}, adds_start=True, adds_end=False)

CLASSES: Mapping[str, TokenizerClass] = MappingProxyType(
    {
        "Bert": _BERT,
        "DistilBert": _BERT,
        "Electra": _BERT,
        "MPNet": TokenizerClass("wordpiece", _CLASSIC | {"unk": "[UNK]"}, _AROUND, _AROUND_TWO_APART),
        "GPT2": _GPT2,
        "GPTNeoX": _GPT2,
        "Roberta": _ROBERTA,
        "Bart": _ROBERTA,
        "Blenderbot": TokenizerClass("byte-bpe", _CLASSIC, ("A", "eos"), ("A", "eos"), prefix_space=True),
        "T5": _T5,
        "Llama": _LLAMA,
        "Gemma": TokenizerClass(
            "pieces",
            {"pad": "<pad>", "unk": "<unk>", "bos": "<bos>", "eos": "<eos>"},
            adds_start=True,
            adds_end=False,
        ),
        "DebertaV2": TokenizerClass(
            "pieces",
            _BRACKETS | {"bos": "[CLS]", "eos": "[SEP]"},
            _AROUND,
            _AROUND_TWO,
            second_segment=True,
            last_entries=("[MASK]",),
            lowers=False,
        ),
        "XLMRoberta": TokenizerClass(
            "pieces", _CLASSIC, _AROUND, _AROUND_TWO_APART, front=_FAIRSEQ, skip=3, last_entries=("<mask>",)
        ),
        "Camembert": TokenizerClass(
            "pieces",
            _CLASSIC,
            _AROUND,
            _AROUND_TWO_APART,
            front=("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"),
            skip=1,
            last_entries=("<mask>",),
        ),
        "MBart": TokenizerClass(
            "pieces",
            _CLASSIC,
            ("A", "eos", "language"),
            ("A", "B", "eos", "language"),
            front=_FAIRSEQ,
            skip=3,
            last_entries=(*_LANGUAGES_25, "<mask>"),
            languages=_LANGUAGES_25,
            language_is_start=True,
        ),
        "MBart50": TokenizerClass(
            "pieces",
            _CLASSIC,
            ("language", "A", "eos"),
            ("language", "A", "B", "eos"),
            front=_FAIRSEQ,
            skip=3,
            last_entries=(*_LANGUAGES_52, "<mask>"),
            languages=_LANGUAGES_52,
        ),
        "Nllb": TokenizerClass(
            "pieces",
            _CLASSIC,
            ("language", "A", "eos"),
            ("language", "A", "B", "eos"),
            front=_FAIRSEQ,
            skip=3,
            legacy_single=("A", "eos", "language"),
        ),
        "M2M100": TokenizerClass(
            "strings",
            {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>"},
            ("language", "A", "eos"),
            ("language", "A", "B", "eos"),
            languages=_LANGUAGES_100,
            language_form="__{}__",
            language_set="m2m100",
        ),
        "Pegasus": TokenizerClass(
            "pieces",
            {"pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask_2>"},
            ("A", "eos"),
            ("A", "B", "eos"),
            front=("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, 103))),
            skip=2,
        ),
        "Marian": TokenizerClass(
            "two-sided", {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}, ("A", "eos"), ("A", "B", "eos")
        ),
    }
)

# `model_type` of config.json -> class of a checkpoint whose tokenizer_config.json names no class.
CLASS_OF_TYPE: Mapping[str, str] = MappingProxyType(
    {
        "bart": "Bart",
        "bert": "Bert",
        "blenderbot": "Blenderbot",
        "camembert": "Camembert",
        "deberta-v2": "DebertaV2",
        "distilbert": "DistilBert",
        "electra": "Electra",
        "gemma": "Gemma",
        "gemma2": "Gemma",
        "gpt2": "GPT2",
        "gpt_neo": "GPT2",
        "gptj": "GPT2",
        "llama": "Llama",
        "m2m_100": "M2M100",
        "marian": "Marian",
        "mbart": "MBart",
        "mistral": "Llama",
        "mpnet": "MPNet",
        "mt5": "T5",
        "opt": "GPT2",
        "pegasus": "Pegasus",
        "roberta": "Roberta",
        "t5": "T5",
        "xlm-roberta": "XLMRoberta",
    }
)

# Classes that prepare text with code that is not in their files -> the reason.
NEEDS_CUSTOM_CODE: Mapping[str, str] = MappingProxyType(
    {
        "Albert": "it normalizes text by rules that only a tokenizer.json has",
        "BlenderbotSmall": "it splits words by special rules",
        "FSMT": "it needs the Moses tokenizer",
        "BertJapanese": "it needs a segmenter for Japanese",
        "Bertweet": "it normalizes tweets by special rules",
        "Phobert": "it needs a segmenter for Vietnamese",
        "ProphetNet": "its files have a special format",
    }
)


def class_stem(name: str) -> str:
    """Return the name of a tokenizer class without its suffixes: "BertTokenizerFast" -> "Bert"."""
    return name.removesuffix("Fast").removesuffix("Tokenizer")
