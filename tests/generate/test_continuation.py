"""Laws of generation: cached, padded, batched and streamed, it equals a plain loop without a cache."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from numpy.random import PCG64, Generator

from clearhead import core as ch
from clearhead.base.errors import InputError, RunFailure
from clearhead.generate import continuation
from clearhead.generate.continuation import GenerateRequest, generate_ids, stream_ids
from clearhead.generate.options import GenerateOptions
from clearhead.generate.prefill import pad_left, prefill_prompts
from clearhead.generate.processors import apply, build_logits_processors, build_logits_warpers
from clearhead.generate.results import Continuation
from clearhead.generate.search.sampling import RandomStream, draw, sequence_seed
from tests.generate.tiny import BOS, EOS, PAD, next_logits, some_prompts, some_sources, tiny_decoder, tiny_model

KINDS = ("original", "modern")
SAMPLING = GenerateOptions(
    max_new_tokens=11, temperature=1.3, top_k=7, top_p=0.95, repetition_penalty=1.2, no_repeat_ngram_size=3, seed=5,
    min_new_tokens=2, encoder_no_repeat_ngram_size=2,
)  # fmt: skip


def letters(ids: list[int]) -> str:
    """Return a text of one letter for each ordinary id."""
    return "".join(chr(ord("a") + index) for index in ids if index > EOS)


def request(prompts: list[list[int]], options: GenerateOptions, **changes: object) -> GenerateRequest:
    return dataclasses.replace(
        GenerateRequest(prompts, options, eos_id=EOS, pad_id=PAD, banned=(PAD, BOS, EOS), decode=letters), **changes
    )


def generate(
    module: ch.Transformer, prompts: list[list[int]], options: GenerateOptions, **changes: object
) -> list[list[Continuation]]:
    return generate_ids(module, request(prompts, options, **changes))


def plain_loop(
    module: ch.Transformer,
    prompt: list[int],
    options: GenerateOptions,
    number: int = 0,
    source: list[int] | None = None,
) -> tuple[tuple[int, ...], float]:
    """The definition: one pass over the whole sequence for each token, without padding."""
    stream = RandomStream(sequence_seed(options.seed, number, [*prompt, *(source or [])]))
    chain = build_logits_processors(
        options, (EOS,), len(prompt), torch.tensor([PAD, BOS]), torch.tensor([source or prompt])
    )
    ids, total = list(prompt), 0.0
    while len(ids) - len(prompt) < options.max_new_tokens:
        logits_1V = next_logits(module, ids, source)[None].float()
        changed_1V = apply([*chain, *build_logits_warpers(options)], logits_1V, torch.tensor([ids]))
        sampled = options.method == "sample"
        uniform = torch.tensor([stream.next()], dtype=torch.float64) if sampled else torch.zeros(1)
        token = int(draw(changed_1V.softmax(1), uniform)) if sampled else int(changed_1V.argmax())
        total += float(logits_1V.double().log_softmax(1)[0, token])
        ids.append(token)
        if token == EOS:
            break
    return tuple(ids[len(prompt) :]), total


def assert_same(actual: list[list[Continuation]], expected: list[list[Continuation]]) -> None:
    assert [[result.ids for result in some] for some in actual] == [
        [result.ids for result in some] for some in expected
    ]
    assert [[result.stop_reason for result in some] for some in actual] == [
        [e.stop_reason for e in some] for some in expected
    ]
    scores = [result.score for some in expected for result in some]
    assert [result.score for some in actual for result in some] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [GenerateOptions(max_new_tokens=11), SAMPLING], ids=["greedy", "sampling"])
def test_generation_is_the_plain_loop(kind: str, options: GenerateOptions) -> None:
    """Prompts of unequal length are padded on the left and rows leave at different steps, without an effect."""
    module = tiny_decoder(kind, seed=1, end_bonus=1.0)
    prompts = some_prompts(5, longest=11)
    actual = generate(module, prompts, options)
    assert {result.stop_reason for (result,) in actual} == {"end", "length"}
    assert len({len(result.ids) for (result,) in actual}) > 2, "no row left early"
    for prompt, (result,) in zip(prompts, actual, strict=True):
        ids, total = plain_loop(module, prompt, options)
        assert result.ids == ids and result.stop_reason == ("end" if ids[-1] == EOS else "length")
        assert result.log_probability == pytest.approx(total, abs=1e-4)
        assert result.score == pytest.approx(total / len(ids), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_left_padding_is_no_padding(kind: str) -> None:
    module = tiny_decoder(kind, seed=9)
    prompts = some_prompts(5, longest=13)
    ids, mask = pad_left(prompts, PAD, torch.device("cpu"))
    assert [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)] == prompts and mask[:, -1].all()
    with torch.inference_mode():
        together = prefill_prompts(module, prompts, pad_id=PAD)
        for row, prompt in enumerate(prompts):
            alone = prefill_prompts(module, [prompt], pad_id=PAD)
            torch.testing.assert_close(together.logits[row], alone.logits[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(together.logits[row], next_logits(module, prompt), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_does_not_depend_on_its_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, with others, in another order, in small batches, or among several: one seed gives one text."""
    module = tiny_decoder(kind, seed=1, end_bonus=1.0)
    prompts = some_prompts(3, longest=11)
    options = dataclasses.replace(SAMPLING, num_return_sequences=3)
    together = generate(module, prompts, options)
    assert all(len({result.ids for result in some}) > 1 for some in together), "several sequences are equal"
    for index, prompt in enumerate(prompts):
        for number, result in enumerate(together[index]):
            assert result.ids == plain_loop(module, prompt, options, number)[0]
    assert_same(generate(module, prompts[::-1], options)[::-1], together)
    assert_same([some[:1] for some in together], generate(module, prompts, SAMPLING))
    monkeypatch.setattr(continuation, "CPU_CACHE_TOKENS", 100)
    assert_same(generate(module, prompts, dataclasses.replace(options, batch_size=2)), together)


def test_seeds_reproduce_and_differ() -> None:
    module = tiny_decoder("modern", seed=8)
    prompts = [[BOS, 3, 4], [BOS, 3, 4]]
    first, again = (generate(module, prompts, SAMPLING) for _ in range(2))
    assert first == again and first[0][0].ids == first[1][0].ids
    assert generate(module, prompts, dataclasses.replace(SAMPLING, seed=6))[0][0].ids != first[0][0].ids
    # Nearly flat and long: two equal sequences by chance are practically impossible.
    flat = {"temperature": 100.0, "top_p": 1.0, "min_new_tokens": 30, "max_new_tokens": 30}
    free = dataclasses.replace(SAMPLING, seed=None, **flat)
    chances = {result.ids for _ in range(2) for (result,) in generate(module, prompts, free)}
    assert len(chances) == 4, "without a seed, every sequence is new"


def test_tokens_are_drawn_with_their_probabilities() -> None:
    probs = torch.tensor([[0.0, 0.1, 0.0, 0.2, 0.7, 0.0, 0.0]])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = draw(probs.expand(1000, -1), uniform).bincount(minlength=7)
    assert drawn.tolist() == [0, 100, 0, 200, 700, 0, 0]
    edges = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert draw(probs.expand(2, -1), edges).tolist() == [1, 4], "ids of probability 0 are never drawn"


def test_a_stream_is_that_of_its_seed() -> None:
    """Numbers drawn ahead change nothing, and other sequences of a prompt have other numbers."""
    first, same, other = (RandomStream(sequence_seed(3, number, [1, 7])) for number in (2, 2, 1))
    numbers = [first.next() for _ in range(150)]
    assert numbers == [same.next() for _ in range(150)] and len(set(numbers)) == 150
    assert np.array_equal(numbers, Generator(PCG64(sequence_seed(3, 2, [1, 7]))).random(150))
    assert not {*numbers} & {other.next() for _ in range(150)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [GenerateOptions(max_new_tokens=7), SAMPLING], ids=["greedy", "sampling"])
def test_two_stacks_generate_by_the_same_loop(kind: str, options: GenerateOptions) -> None:
    module = tiny_model(kind, seed=8, target_vocab=13, end_bonus=1.0)
    sources = some_sources(3, longest=11)
    chosen = options if options.method == "greedy" else dataclasses.replace(options, num_return_sequences=2)
    actual = generate(module, [[BOS]] * 3, chosen, sources=sources)
    for source, some in zip(sources, actual, strict=True):
        for number, result in enumerate(some):
            ids, total = plain_loop(module, [BOS], chosen, number, source)
            assert result.ids == ids and result.log_probability == pytest.approx(total, abs=1e-4)


def test_a_token_costs_one_row_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is read once, each token once, the last token never, and finished rows are not computed."""
    module = tiny_decoder("modern", seed=1, end_bonus=1.0)
    shapes: list[tuple[int, int]] = []
    assert module.decoder is not None
    module.decoder.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].ids.shape)))
    prompts = some_prompts(5, longest=11)
    actual = generate(module, prompts, GenerateOptions(max_new_tokens=11))
    lengths = [len(result.ids) for (result,) in actual]
    assert shapes[0] == (5, max(map(len, prompts)))
    assert shapes[1:] == [(sum(length > step for length in lengths), 1) for step in range(1, max(lengths))]


def test_stop_texts_end_a_sequence_and_are_not_in_its_text() -> None:
    module = tiny_decoder("original", seed=8)
    prompts = some_prompts(5, longest=7)
    free = [result.ids for (result,) in generate(module, prompts, GenerateOptions(max_new_tokens=13))]
    stop = letters(list(free[0][3:5]))
    actual = generate(module, prompts, GenerateOptions(max_new_tokens=13, stop=[stop, "zz"]))
    for ids, (result,) in zip(free, actual, strict=True):
        text = letters(list(ids))
        assert result.text == text.split(stop)[0]
        if stop in text:
            assert result.stop_reason == "stop" and result.ids == ids[: text.index(stop) + len(stop)]
        else:
            assert result.ids == ids and result.stop_reason == ("end" if ids[-1] == EOS else "length")
    assert actual[0][0].stop_reason == "stop"


@pytest.mark.parametrize(
    "options", [GenerateOptions(max_new_tokens=13), SAMPLING, GenerateOptions(max_new_tokens=13, stop="jk")]
)
def test_the_stream_is_the_text(options: GenerateOptions) -> None:
    module = tiny_decoder("modern", seed=1, end_bonus=1.0).train()
    for prompt in some_prompts(3, longest=7):
        stream = stream_ids(module, request([prompt], options))
        pieces: list[str] = []
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as end:
                returned = end.value
                break
            assert not torch.is_inference_mode_enabled(), "inference mode leaks into the caller"
        assert module.training
        (expected,) = generate(module, [prompt], options)[0]
        assert returned.ids == expected.ids and "".join(pieces) == returned.text
        assert returned.text == (letters(list(expected.ids)) if expected.text is None else expected.text)
        assert len(pieces) > 1 or len(returned.text) < 2


def test_a_stream_that_is_closed_leaves_the_model_as_it_was() -> None:
    module = tiny_decoder("modern", seed=8).train()
    stream = stream_ids(module, request([[BOS]], GenerateOptions(max_new_tokens=13)))
    next(stream)
    assert all(submodule.training for submodule in module.modules())
    stream.close()
    assert all(submodule.training for submodule in module.modules())


def test_a_very_long_prompt_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_decoder("modern", seed=8)
    assert module.max_positions is None
    monkeypatch.setattr(type(module.decoder), "forward", lambda *arguments, **named: pytest.fail("the prompt was read"))
    for ask in (generate_ids, stream_ids):
        with pytest.raises(InputError, match="prompt 1 has 131,073 tokens, but at most 131,072 are read at once"):
            ask(module, request([[3] * 131_073], GenerateOptions()))


def test_a_table_of_positions_is_the_limit() -> None:
    """All positions can be used, plus one token that is not read; a longer prompt is refused by its number."""
    module = tiny_decoder("original", seed=8, positions=11, end_bonus=-99.0)
    for length, room in ((3, 9), (10, 2), (11, 1)):
        ((result,),) = generate(module, [[BOS, *[3] * (length - 1)]], GenerateOptions(max_new_tokens=50))
        assert len(result.ids) == room and result.stop_reason == "length"
    with pytest.raises(InputError, match="prompt 2 has 12 tokens, the start token included, but the model has 11"):
        generate(module, [[BOS], [BOS] * 12], GenerateOptions())
    ((result,),) = generate(
        tiny_decoder("modern", seed=8, end_bonus=-99.0), [[BOS] * 90], GenerateOptions(max_new_tokens=7)
    )
    assert len(result.ids) == 7, "computed positions set no limit"


def test_what_cannot_generate_is_refused() -> None:
    two, decoder_only = tiny_model("original", seed=1), tiny_decoder("original", seed=1)
    options = GenerateOptions()
    with pytest.raises(InputError, match="needs a source for each prompt"):
        generate(two, [[BOS]], options)
    with pytest.raises(InputError, match="reads its prompt with the decoder"):
        generate(decoder_only, [[BOS]], options, sources=[[3]])
    with pytest.raises(InputError, match="needs a model with a decoder"):
        generate(ch.build(encoder_of(two)), [[BOS]], options)
    with pytest.raises(InputError) as caught:
        generate(decoder_only, [[], [BOS, 13], [3]], options)
    assert all(phrase in str(caught.value) for phrase in ("2 faults", "prompt 1 has no tokens", "prompt 2 holds ids"))
    with pytest.raises(InputError, match="no text is final before the end"):
        next(stream_ids(decoder_only, request([[BOS]], GenerateOptions(beam_size=2))))
    with pytest.raises(InputError, match="leave num_return_sequences at 1"):
        next(stream_ids(decoder_only, request([[BOS]], GenerateOptions(num_return_sequences=2))))


def encoder_of(two: ch.Transformer) -> object:
    return two.spec.model_copy(update={"decoder": None, "head": None})


@pytest.mark.parametrize("options", [GenerateOptions(), SAMPLING, GenerateOptions(beam_size=2)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_output_that_is_no_number_is_a_failure(options: GenerateOptions, value: float) -> None:
    module = tiny_decoder("modern", seed=8)
    with torch.no_grad():
        module.head.layers[-1].bias[5] = value
    with pytest.raises(RunFailure, match=r"is not a number|is infinite"):
        generate(module, [[BOS, 3]], options)


@pytest.mark.parametrize("options", [GenerateOptions(), SAMPLING, GenerateOptions(beam_size=2)])
def test_a_vocabulary_that_is_used_up_is_a_failure(options: GenerateOptions) -> None:
    module = tiny_decoder("modern", seed=8)
    spent = dataclasses.replace(options, no_repeat_ngram_size=1, min_new_tokens=20, max_new_tokens=20)
    with pytest.raises(RunFailure, match="no token may follow"):
        generate(module, [[BOS, 3]], spent)
