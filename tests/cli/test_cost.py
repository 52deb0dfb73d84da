"""The cost of a model is counted by hand here and read off the spec there."""

from __future__ import annotations

from clearhead.cli.cost import cost_per_token
from clearhead.spec import (
    Attention,
    Branch,
    Causal,
    Embedding,
    FeedForward,
    Head,
    Layer,
    Linear,
    Model,
    Stack,
    Step,
    Table,
    Window,
)

WIDTH, VOCAB, SOURCE, TARGET = 12, 31, 7, 5


def stack(*functions: Attention | FeedForward) -> Stack:
    steps = tuple(Step(branches=(Branch(function=function),)) for function in functions)
    return Stack(width=WIDTH, embedding=Embedding(table=Table(rows=VOCAB)), layers=(Layer(steps=steps),))


def attention(**changes: object) -> Attention:
    return Attention.model_validate({"num_heads": 3, "num_kv_heads": 1, "head_size": 2, **changes})


HEAD = Head(layers=(Linear(size=VOCAB),))


def test_two_stack_model() -> None:
    encoder = stack(attention(), FeedForward(size=11))
    decoder = stack(attention(mask=Causal()), attention(source="memory"), FeedForward(size=11, gated=True))
    cost = cost_per_token(Model(encoder=encoder, decoder=decoder, head=HEAD), SOURCE, TARGET)
    inner, key_value = 3 * 2, 2 * 1 * 2
    projections = 2 * WIDTH * inner * 2
    own_key_value = 2 * WIDTH * key_value
    encoder_flops = projections + own_key_value + 4 * inner * SOURCE + 2 * 2 * WIDTH * 11
    memory_key_value = 2 * WIDTH * key_value
    assert cost.source_flops == encoder_flops + memory_key_value
    causal = projections + own_key_value + 4 * inner * ((TARGET + 1) // 2)
    memory = projections + 4 * inner * SOURCE
    assert cost.target_flops == causal + memory + 3 * 2 * WIDTH * 11 + 2 * WIDTH * VOCAB
    assert (cost.cache_numbers, cost.memory_numbers) == (key_value, key_value)


def test_single_stacks_cost_only_target_tokens() -> None:
    one = stack(FeedForward(size=11))
    for model in (Model(encoder=one, head=HEAD), Model(decoder=one, head=HEAD)):
        cost = cost_per_token(model, SOURCE, TARGET)
        assert (cost.source_flops, cost.target_flops) == (0, 2 * 2 * WIDTH * 11 + 2 * WIDTH * VOCAB)


def test_a_window_bounds_the_cost_of_length() -> None:
    model = Model(decoder=stack(attention(mask=Window(before=2, after=0))))
    assert cost_per_token(model, 1, 101) == cost_per_token(model, 1, 1009)
    assert cost_per_token(model, 1, 2).target_flops < cost_per_token(model, 1, 101).target_flops
