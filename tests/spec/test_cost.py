"""The cost of a model is counted by hand here and read off the spec there."""

from __future__ import annotations

from clearhead.spec import (
    Attention,
    Branch,
    Causal,
    Embedding,
    FeedForward,
    Head,
    Layer,
    Linear,
    MixtureOfExperts,
    Model,
    Projection,
    Stack,
    Step,
    Table,
    Window,
)
from clearhead.spec.cost import cost_per_token

WIDTH, VOCAB, SOURCE, TARGET = 12, 31, 7, 5


def stack(*functions: Attention | FeedForward | MixtureOfExperts) -> Stack:
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
    single_stack = stack(FeedForward(size=11))
    for model in (Model(encoder=single_stack, head=HEAD), Model(decoder=single_stack, head=HEAD)):
        cost = cost_per_token(model, SOURCE, TARGET)
        assert (cost.source_flops, cost.target_flops) == (0, 2 * 2 * WIDTH * 11 + 2 * WIDTH * VOCAB)


def test_a_window_bounds_the_cost_of_length() -> None:
    model = Model(decoder=stack(attention(mask=Window(before=2, after=0))))
    assert cost_per_token(model, 1, 101) == cost_per_token(model, 1, 1009)
    assert cost_per_token(model, 1, 2).target_flops < cost_per_token(model, 1, 101).target_flops


def test_experts_cost_what_a_token_passes_through_and_shared_layers_count_at_each_depth() -> None:
    mixture = MixtureOfExperts(count=7, top_k=2, expert=FeedForward(size=11, gated=True))
    flops_once = 2 * WIDTH * 7 + 2 * 3 * 2 * WIDTH * 11
    assert cost_per_token(Model(decoder=stack(mixture)), 1, 5).target_flops == flops_once
    shared = stack(mixture).model_copy(update={"sharing": (0, 0, 0)})
    assert cost_per_token(Model(decoder=shared), 1, 5).target_flops == 3 * flops_once
    attending = stack(attention()).model_copy(update={"sharing": (0, 0, 0)})
    assert cost_per_token(Model(decoder=attending), 1, 5).cache_numbers == 3 * 2 * 1 * 2


def test_a_projection_from_another_width_counts() -> None:
    embedding = Embedding(table=Table(rows=VOCAB), width=5, projection=Projection(place="before_norm", bias=False))
    projected_stack = stack(FeedForward(size=11)).model_copy(update={"embedding": embedding})
    cost = cost_per_token(Model(decoder=projected_stack, head=HEAD), 1, 5)
    assert cost.target_flops == 2 * 2 * WIDTH * 11 + 2 * 5 * WIDTH + 2 * WIDTH * VOCAB
