"""Texts in, translations or their scores out: what stands around both sides, and what a checkpoint's files say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.generate.generation_config import GenerationRules
from clearhead.generate.hypothesis import Hypothesis
from clearhead.generate.options import SearchOptions
from clearhead.generate.prompts import check_rules, wordless
from clearhead.generate.scoring import PairScore, score_framed
from clearhead.generate.search import translate_ids
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import Frame


def translate_texts(
    module: Transformer,
    tokenizers: TokenizerPair,
    texts: Sequence[str],
    options: SearchOptions,
    frame: Frame,
    rules: GenerationRules | None,
) -> list[list[Hypothesis]]:
    """Search for translations; an empty text gives one empty hypothesis.

    Args:
        module: an encoder-decoder model.
        tokenizers: of the model.
        texts: one sentence each.
        options: how to search.
        frame: what stands around a source, and around what is written.
        rules: what the files of a checkpoint say besides; None: a model that was trained here.

    Raises:
        InputError: a single stack, a text longer than the model's positions, or files that say nothing about where a
            decoder starts, or ask for what is not done here.
    """
    if isinstance(texts, str):
        raise InputError("translate() takes a list of texts; put the single text into a list")
    check_two_stacks(module)
    target, said = tokenizers.target, frame.said
    if rules is not None:
        check_rules(rules, needs_start=True)
        rules = replace(rules, banned=(*rules.banned, *wordless(module, target)))
    filled = [text for text in texts if text.strip()]
    found = iter(
        translate_ids(
            module,
            [frame.read(ids) for ids in tokenizers.source.encode_batch(filled)],
            bos_id=said.front[0],
            eos_id=said.behind[-1],
            pad_id=tokenizers.source.pad_id if rules is None or rules.pad is None else rules.pad,
            options=options,
            rules=rules,
        )
    )
    nothing = Hypothesis("", [], 0.0, 0.0)
    return [
        [
            Hypothesis(target.decode(one.ids), target.tokens(one.ids), one.score, one.log_probability)
            for one in next(found)
        ]
        if text.strip()
        else [nothing]
        for text in texts
    ]


def score_translations(
    module: Transformer,
    tokenizers: TokenizerPair,
    sources: Sequence[str],
    targets: Sequence[str],
    frame: Frame,
    rules: GenerationRules | None,
    *,
    length_penalty: float,
) -> list[PairScore]:
    """Return how probable a model finds each target given its source: the score that search reports.

    Args:
        module, tokenizers, frame, rules: as for `translate_texts`.
        sources, targets: as many of one as of the other.
        length_penalty: exponent alpha of the score.

    Raises:
        InputError: a single stack, unequal counts, or a sequence beyond the model's positions.
    """
    check_two_stacks(module)
    return score_framed(
        module,
        [frame.read(ids) for ids in tokenizers.source.encode_batch(list(sources))],
        [frame.said(ids) for ids in tokenizers.target.encode_batch(list(targets))],
        pad_id=tokenizers.source.pad_id,
        # What a checkpoint forces, its search finds certain.
        forced=0 if rules is None or rules.first is None else 1,
        length_penalty=length_penalty,
    )


def check_two_stacks(module: Transformer) -> None:
    """Refuse models that do not translate.

    Raises:
        InputError: there is a single stack.
    """
    if module.encoder is None or module.decoder is None:
        raise InputError("translation needs a model with encoder and decoder; this one has a single stack")
