"""From text to text: collation, the start of a continuation, and streams, with tokenizers trained in the test."""

from __future__ import annotations

import pytest
import torch

from clearhead import core as ch
from clearhead.base.errors import InputError
from clearhead.generate.decoder import Decoder, encode_prompt
from clearhead.generate.options import GenerateOptions
from clearhead.generate.scoring.texts import score_texts
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.tasks.evaluate.text_loss import text_loss
from clearhead.text.chat import ChatTemplate
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

CORPUS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog — größer, naïve 😀"] * 3


def tokenizer_of(kind: str) -> Tokenizer:
    return train_tokenizer(kind, CORPUS, vocab_size={"byte": 260, "byte-bpe": 300, "bpe": 53}.get(kind, 70))


def model_of(family: str, vocab: int, extra: int = 0) -> ch.Transformer:
    torch.manual_seed(11)
    hparams = Hyperparameters(
        family=family, layers=1, width=14, heads=2, head_size=6, feedforward=19, dropout=0.0, positions="rotary",
        tie="none", initialization="normal", output_bias=True,
    )  # fmt: skip
    module = ch.build(build_spec(hparams, source_vocab=vocab + extra, target_vocab=vocab + extra)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(20.0)  # A new model has no preferences.
    return module


def decoder_of(module: ch.Transformer, tokenizer: Tokenizer, *, continues: bool = True) -> Decoder:
    pair = TokenizerPair(source=tokenizer, target=tokenizer, joint=True)
    return Decoder(module, pair, tokenizer.special_tokens, continues=continues)


@pytest.mark.parametrize("kind", ["character", "byte-bpe", "bpe"])
@pytest.mark.parametrize(
    "options",
    [
        GenerateOptions(max_new_tokens=11),
        GenerateOptions(max_new_tokens=11, seed=3, stop=["o", "at"]),
        GenerateOptions(max_new_tokens=5, beam_size=3, num_return_sequences=2),
    ],
    ids=["greedy", "stops", "beam"],
)
def test_text_is_what_stands_behind_the_prompt(kind: str, options: GenerateOptions) -> None:
    """Prompt and text together equal the decoded ids; a leading space belongs to the text."""
    tokenizer = tokenizer_of(kind)
    module = model_of("decoder", tokenizer.vocab_size)
    prompts = ["the cat", "", "a dog sat on"]
    actual = decoder_of(module, tokenizer).generate(prompts, options)
    assert [len(some) for some in actual] == [options.num_return_sequences] * 3
    for prompt, some in zip(prompts, actual, strict=True):
        for result in some:
            assert result.tokens and result.stop_reason in ("end", "stop", "length")
            ids = [
                i for token in result.tokens for i in range(tokenizer.vocab_size) if tokenizer.tokens([i]) == [token]
            ]
            whole = tokenizer.decode([*tokenizer.encode(prompt), *ids])
            assert whole.startswith(prompt)
            behind = whole[len(prompt) :]
            assert result.text == min((behind.split(stop)[0] for stop in options.stops), key=len, default=behind)
            if options.stops:
                assert (result.stop_reason == "stop") == any(stop in behind for stop in options.stops)


def test_a_stream_is_the_same_text() -> None:
    tokenizer = tokenizer_of("byte-bpe")
    module = model_of("decoder", tokenizer.vocab_size)
    options = GenerateOptions(max_new_tokens=23, temperature=1.0, seed=4)
    stream, pieces = decoder_of(module, tokenizer).stream("the cat", options), []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            whole = end.value
            break
    ((result,),) = decoder_of(module, tokenizer).generate(["the cat"], options)
    assert "".join(pieces) == result.text == whole.text and whole.tokens == result.tokens
    assert len(pieces) > 3


def test_outputs_without_an_entry_and_special_ids_are_never_generated() -> None:
    tokenizer = tokenizer_of("character")
    module = model_of("decoder", tokenizer.vocab_size, extra=300)
    options = GenerateOptions(max_new_tokens=29, seed=1, num_return_sequences=3)
    for result in decoder_of(module, tokenizer).generate(["the"], options)[0]:
        special = tokenizer.tokens([tokenizer.pad_id, tokenizer.bos_id])
        assert not set(result.tokens) & set(special)


@pytest.mark.parametrize("continues", [True, False])
def test_two_stacks_read_the_prompt_with_the_encoder(continues: bool) -> None:
    tokenizer = tokenizer_of("byte-bpe")
    module = model_of("encoder-decoder", tokenizer.vocab_size)
    options = GenerateOptions(max_new_tokens=11)
    decoder = decoder_of(module, tokenizer, continues=continues)
    actual = decoder.generate(["the cat", "", "a dog sat on"], options)
    for prompt, (result,) in zip(["the cat", "", "a dog sat on"], actual, strict=True):
        source = torch.tensor([[*tokenizer.encode(prompt), tokenizer.eos_id]])
        ids = [tokenizer.bos_id]
        while len(ids) <= 11 and (len(ids) == 1 or ids[-1] != tokenizer.eos_id):
            with torch.no_grad():
                logits = module(source, torch.tensor([ids])).logits[0, -1]
            logits[[tokenizer.bos_id, tokenizer.pad_id]] = -torch.inf
            ids.append(int(logits.argmax()))
        assert result.tokens == tokenizer.tokens(ids[1:])
        front = tokenizer.encode(prompt) if continues else []
        assert tokenizer.decode(front) + result.text == tokenizer.decode([*front, *ids[1:]])


def test_scores_and_loss_of_texts_are_those_of_framed_ids() -> None:
    tokenizer = tokenizer_of("character")
    module = model_of("decoder", tokenizer.vocab_size)
    texts = ["the cat", "", "größer 😀"]
    scores = score_texts(module, tokenizer, texts)
    for text, actual in zip(texts, scores, strict=True):
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        with torch.no_grad():
            log_probs = module(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(1)
        expected = log_probs[range(len(ids) - 1), ids[1:]].tolist()
        assert actual.token_log_probabilities == pytest.approx(expected, abs=1e-4)
    loss = text_loss(module, tokenizer, texts, window=5, stride=2)
    assert loss.num_bytes == sum(len(text.encode()) for text in texts)
    assert loss.num_tokens == sum(len(score.ids) for score in scores)


def test_a_chat_template_may_not_make_far_more_tokens_than_the_chat_has() -> None:
    tokenizer = train_tokenizer("byte", ["a b"], vocab_size=300)
    few = ChatTemplate({"default": "{{ messages[0].content * 2 }}" + "\U0001f600" * 2000}, {})
    assert len(encode_prompt(tokenizer, "a" * 9000, few)) == 2 * 9000 + 4 * 2000
    many = ChatTemplate({"default": "{{ '\U0001f600' * 30000 }}"}, {})
    with pytest.raises(InputError, match=r"makes 120,000 tokens of this chat, but at most 8,194 are allowed"):
        encode_prompt(tokenizer, "a", many)
