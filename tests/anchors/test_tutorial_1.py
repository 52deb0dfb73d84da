"""Tutorial 1, an encoder-decoder step by step, with width 6, 10 tokens, 2 heads and a batch of 4.

anchor              test
1.2, 1.15           test_token_ids
1.3                 test_windows
1.4                 test_sinusoidal_table
1.5                 test_positions_can_be_learned
1.6                 test_input_layer
1.7, 1.9, 1.10      test_projections_and_heads
1.8                 test_masks
1.11, 1.b11         test_layer_norm_by_hand
1.12                test_norm_before_or_after
1.13                test_feed_forward
1.14                test_layers_have_two_and_three_steps
1.16, 1.b18         test_shift_right
1.17, 1.18          test_attention_blocks
1.19, 1.b20         test_logits_and_probabilities
1.20                test_three_families
1.b1                test_width_must_divide_by_heads
1.b3                test_positions_and_masks_are_no_weights
1.b4 [run]          test_short_input_is_not_broadcast, test_long_input_is_refused
1.b5                test_odd_width_is_refused
1.b10               test_scale_is_the_root_of_the_head_size
1.b13               test_dropout_rate_arrives
1.b15               test_cross_attention_direction
1.b17               test_ids_are_integers
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core.context import Masking
from clearhead.core.kernels.positions import sinusoidal_table
from clearhead.core.norm import LayerNorm
from clearhead.data.sources.pairs import parallel_files
from clearhead.data.stores.store import prepare_pairs
from clearhead.tasks.translate.train import collate_pairs
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from tests.anchors import builders

OPENING = "Chapter 1\n\n\n\nIt was a bright cold day in April"
OPENING_IDS = [14126, 352, 628, 198, 198, 1026, 373, 257, 6016, 4692, 1110, 287, 3035]
WIDTH, LENGTH, HEADS, BATCH, VOCABULARY = 6, 10, 2, 4, 50257


@pytest.fixture(scope="module")
def tokenizer(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tutorial's tokenizer, with its one special token in every role."""
    folder = data_dir / "gpt2-tokenizer"
    backend = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return Tokenizer.load(path, roles={"eos": "<|endoftext|>", "bos": "<|endoftext|>"})


def test_token_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.encode(OPENING) == OPENING_IDS
    assert tokenizer.encode("THE END\n") == [10970, 23578, 198]
    started = [tokenizer.bos_id, *tokenizer.encode(" machine learning using PyTorch")]
    assert started == [50256, 4572, 4673, 1262, 9485, 15884, 354]
    pieces = ["<|endoftext|>", "Ġmachine", "Ġlearning", "Ġusing", "ĠPy", "Tor", "ch"]
    assert tokenizer.tokens(started) == pieces
    assert tokenizer.decode(OPENING_IDS) == OPENING


def windows(ids: list[int]) -> Tensor:
    return torch.tensor(ids).unfold(0, LENGTH, 1)


def test_windows() -> None:
    rows = windows(OPENING_IDS)
    assert rows.shape == (len(OPENING_IDS) - 9, LENGTH) == (BATCH, LENGTH)
    assert all(rows[n].tolist() == OPENING_IDS[n : n + LENGTH] for n in range(BATCH))
    out = ch.build(builders.transformer(source_vocabulary=VOCABULARY)).encode(rows)
    assert out.memory.shape == (BATCH, LENGTH, WIDTH)


def test_sinusoidal_table() -> None:
    table = sinusoidal_table(LENGTH, WIDTH, spec.Sinusoidal())
    assert table.shape == (LENGTH, WIDTH)
    printed = {
        0: [0.0, 1.0, 0.0, 1.0, 0.0, 1.0],
        1: [0.8415, 0.5403, 0.0464, 0.9989, 0.0022, 1.0],
        2: [0.9093, -0.4161, 0.0927, 0.9957, 0.0043, 1.0],
        5: [-0.9589, 0.2837, 0.2300, 0.9732, 0.0108, 0.9999],
        9: [0.4121, -0.9111, 0.4057, 0.9140, 0.0194, 0.9998],
    }
    for row, values in printed.items():
        torch.testing.assert_close(table[row], torch.tensor(values), atol=5.1e-5, rtol=0)
    # The tutorial's steps: even columns over the denominators, sines and cosines stacked and flattened.
    denominators = [10000 ** (column / WIDTH) for column in (0, 2, 4)]
    assert denominators == pytest.approx([1.0, 21.5443, 464.1589], abs=1e-4)
    angles = torch.arange(LENGTH)[:, None] / torch.tensor(denominators)
    stepwise = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
    torch.testing.assert_close(table, stepwise, atol=1e-6, rtol=0)


def test_positions_can_be_learned() -> None:
    stack = builders.stack(WIDTH, HEADS, vocabulary=17, inner=12, position=spec.Learned(rows=LENGTH))
    module = ch.build(spec.Model(encoder=stack))
    table = dict(module.named_parameters())["encoder.embedding.position.weight"]
    ids = torch.randint(17, (BATCH, LENGTH))
    module(ids).hidden.square().sum().backward()
    assert table.grad is not None
    assert table.grad.abs().sum(dim=1).gt(0).all()


def test_input_layer() -> None:
    module = ch.build(builders.transformer(source_vocabulary=VOCABULARY))
    ids = windows(OPENING_IDS)
    position_BT = torch.arange(LENGTH).expand(BATCH, LENGTH)
    embedded = module.encoder.embedding(ids, position_BT, LENGTH)
    assert module.encoder.embedding.table.weight.shape == (VOCABULARY, WIDTH)
    looked_up = module.encoder.embedding.table.weight[ids] * math.sqrt(WIDTH)
    expected = looked_up + sinusoidal_table(LENGTH, WIDTH, spec.Sinusoidal())
    assert embedded.shape == (BATCH, LENGTH, WIDTH)
    torch.testing.assert_close(embedded, expected)


def test_projections_and_heads() -> None:
    """Three projections replace the tutorial's fused one with 18 columns; heads are split and merged the same way."""
    attention = builders.multi_head(WIDTH, HEADS)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    names = ("query", "key", "value")
    fused = torch.cat([getattr(attention, name)(x).unflatten(-1, (HEADS, 3)) for name in names], dim=-1)
    assert fused.flatten(2).shape == (4, 10, 18)
    assert fused.shape == (4, 10, 2, 9)
    query, key, value = fused.permute(0, 2, 1, 3).chunk(3, dim=-1)
    assert query.shape == key.shape == value.shape == (4, 2, 10, 3)
    weights = (query @ key.transpose(-2, -1) / math.sqrt(3)).softmax(dim=-1)
    mixed = weights @ value
    assert (weights.shape, mixed.shape) == ((4, 2, 10, 10), (4, 2, 10, 3))
    merged = mixed.permute(0, 2, 1, 3)
    assert (merged.shape, merged.flatten(2).shape) == ((4, 10, 2, 3), (4, 10, 6))
    ours, our_weights = attention(x, return_weights=True)
    torch.testing.assert_close(our_weights, weights)
    torch.testing.assert_close(ours, attention.out(merged.flatten(2)))


def test_masks() -> None:
    """The tutorial's masks are additive, -inf or 0. Ours are boolean and equivalent."""
    visible = Masking(num_queries=LENGTH, num_keys=LENGTH)
    causal = visible.build(spec.Causal(), torch.device("cpu"))
    additive = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    assert causal is not None
    assert torch.equal(causal[0, 0], additive == 0)
    assert visible.build(spec.Full(), torch.device("cpu")) is None, "nothing is hidden, so nothing is built"


def test_layer_norm_by_hand() -> None:
    residual, branch = torch.randn(2, BATCH, LENGTH, WIDTH).unbind()
    x = residual + branch
    mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, correction=0)
    by_hand = (x - mean) / torch.sqrt(variance + 1e-5)
    ours = LayerNorm((WIDTH,), spec.LayerNorm(eps=1e-5))
    assert by_hand.shape == (4, 10, 6)
    torch.testing.assert_close(ours(x), by_hand)
    torch.testing.assert_close(ours(x), nn.LayerNorm(WIDTH)(x))
    # The tutorial's version by hand omits the residual, although the text calls it equal.
    assert (ours(branch) - by_hand).abs().max() > 0.1


@pytest.mark.parametrize("norm", [spec.LayerNorm(), spec.RMSNorm()])
def test_norm_before_or_after(norm: spec.LayerNorm | spec.RMSNorm) -> None:
    branch = spec.Branch(function=builders.attention(WIDTH, HEADS))
    after = spec.Layer(steps=(spec.Step(branches=(branch,), out=norm),))
    before = spec.Layer(steps=(spec.Step(branches=(branch.model_copy(update={"pre": norm}),)),))
    base = builders.stack(WIDTH, HEADS, vocabulary=17, inner=12)
    ids = torch.randint(17, (BATCH, LENGTH))
    scales = []
    for layer in (after, before):
        module = ch.build(spec.Model(encoder=base.model_copy(update={"layers": (layer,)})))
        scales.append(module(ids).hidden.square().mean(dim=-1))
    torch.testing.assert_close(scales[0], torch.ones(BATCH, LENGTH), atol=1e-3, rtol=0)
    assert (scales[1] - 1).abs().max() > 1e-2, "a norm in front of the branch leaves the stream unnormalised"


def test_feed_forward() -> None:
    function = spec.FeedForward(size=12, dropout=0.1)
    stack = builders.stack(WIDTH, HEADS, vocabulary=17, inner=12)
    layer = spec.Layer(steps=(builders.step(function),))
    module = ch.build(spec.Model(encoder=stack.model_copy(update={"layers": (layer,)})))
    assert module(torch.randint(17, (BATCH, LENGTH))).hidden.shape == (4, 10, 6)
    shapes = {tuple(weight.shape) for name, weight in module.named_parameters() if ".steps." in name}
    assert {(12, 6), (12,), (6, 12), (6,)} <= shapes


def test_layers_have_two_and_three_steps() -> None:
    model = builders.transformer()
    assert model.encoder is not None
    assert model.decoder is not None
    kinds = [[step.branches[0].function.kind for step in s.layers[0].steps] for s in (model.encoder, model.decoder)]
    assert kinds == [["attention", "feed_forward"], ["attention", "attention", "feed_forward"]]
    sources = [getattr(step.branches[0].function, "source", None) for step in model.decoder.layers[0].steps]
    assert sources == ["self", "memory", None]


def test_shift_right(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Every row the decoder reads begins with the start token; its labels are the same tokens one position earlier.

    The tutorial's windows begin with it in the first row only, and have no labels.
    """
    start = torch.full((BATCH, 1), tokenizer.bos_id)
    shifted = torch.cat([start, windows(OPENING_IDS)[:, :-1]], dim=1)
    assert shifted[0].tolist() == [50256, 14126, 352, 628, 198, 198, 1026, 373, 257, 6016]

    sources, targets = ["THE END", "THE END THE"], ["It was a bright cold day in April", "It was a bright cold day"]
    for name, lines in (("source", sources), ("target", targets)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), "utf-8")
    pairs = parallel_files(source=tmp_path / "source", target=tmp_path / "target")
    tokenizers = TokenizerPair(source=tokenizer, target=tokenizer, joint=True)
    store = prepare_pairs(pairs, tokenizers, max_length=20, max_ratio=None, training=True)
    batch = collate_pairs(store, np.array([0, 1]), tokenizers)
    sentence = OPENING_IDS[5:]
    assert batch.target_ids[0].tolist() == [50256, *sentence]
    assert batch.labels[0].tolist() == [*sentence, 50256]
    assert batch.target_ids[1, :7].tolist() == [50256, *sentence[:6]]
    assert batch.labels[1, :7].tolist() == [*sentence[:6], 50256]
    assert batch.target_mask[1].tolist() == [True] * 7 + [False] * 2
    assert batch.labels[1, 7:].eq(-100).all()
    assert batch.ids[0].tolist()[:3] == [10970, 23578, 50256]


def test_attention_blocks() -> None:
    x, memory = torch.randn(2, BATCH, LENGTH, WIDTH).unbind()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for values, weights in (
        builders.multi_head(WIDTH, HEADS)(x, mask=causal[None], return_weights=True),
        builders.multi_head(WIDTH, HEADS)(x, memory, return_weights=True),
    ):
        assert (values.shape, weights.shape) == ((4, 10, 6), (4, 2, 10, 10))


def test_logits_and_probabilities() -> None:
    module = ch.build(builders.transformer(source_vocabulary=VOCABULARY, target_vocabulary=VOCABULARY)).eval()
    ids = windows(OPENING_IDS)
    logits = module(ids, ids).logits
    assert logits.shape == (4, 10, VOCABULARY)
    torch.testing.assert_close(logits.softmax(dim=-1).sum(dim=-1), torch.ones(4, 10))
    # The tutorial applies softmax before the loss, which applies it again: the loss then hardly moves.
    confident = torch.full((1, 5), -20.0)
    confident[0, 3] = 20.0
    label = torch.tensor([3])
    assert F.cross_entropy(confident, label) < 1e-6
    assert F.cross_entropy(confident.softmax(dim=-1), label) > 0.9


def test_three_families() -> None:
    """Encoder-only, decoder-only and encoder-decoder are three specs of one core."""
    whole = builders.transformer()
    only = builders.stack(WIDTH, HEADS, vocabulary=17, inner=12, causal=True)
    head = spec.Head(layers=(spec.Linear(size=17),))
    ids = torch.randint(17, (BATCH, LENGTH))
    modules = [ch.build(m) for m in (whole, spec.Model(encoder=whole.encoder), spec.Model(decoder=only, head=head))]
    assert len({type(module) for module in modules}) == 1
    assert modules[0](ids, ids).logits.shape == (BATCH, LENGTH, 19)
    assert modules[1](ids).hidden.shape == (BATCH, LENGTH, WIDTH)
    assert modules[2](ids).logits.shape == (BATCH, LENGTH, 17)


def test_width_must_divide_by_heads() -> None:
    with pytest.raises(InputError, match="heads"):
        ch.MultiHeadAttention(10, 3)


def test_positions_and_masks_are_no_weights() -> None:
    module = ch.build(builders.transformer())
    ids = torch.randint(17, (BATCH, LENGTH))
    module(ids, ids)
    assert set(module.state_dict()) == {name for name, _ in module.named_parameters()}
    # The table follows the module to another dtype or device, or is made there.
    double = module.double()
    assert double(ids, ids).logits.dtype == torch.float64


class TutorialPositions(nn.Module):
    """The tutorial adds the whole table, for inputs of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = sinusoidal_table(LENGTH, WIDTH, spec.Sinusoidal())

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.table


@pytest.mark.parametrize("length", [1, 7])
def test_short_input_is_not_broadcast(length: int) -> None:
    x = torch.zeros(BATCH, length, WIDTH)
    if length == 1:
        assert TutorialPositions()(x).shape == (BATCH, LENGTH, WIDTH), "one token silently became ten"
    else:
        with pytest.raises(RuntimeError, match="must match the size"):
            TutorialPositions()(x)
    module = ch.build(builders.transformer())
    memory = module.encode(torch.zeros(BATCH, length, dtype=torch.long)).memory
    assert memory.shape == (BATCH, length, WIDTH)


def test_long_input_is_refused() -> None:
    stack = builders.stack(WIDTH, HEADS, vocabulary=17, inner=12, position=spec.Learned(rows=LENGTH))
    module = ch.build(spec.Model(encoder=stack))
    assert module(torch.zeros(BATCH, LENGTH, dtype=torch.long)).hidden.shape == (BATCH, LENGTH, WIDTH)
    with pytest.raises(InputError, match=r"11 tokens.*10 positions"):
        module(torch.zeros(BATCH, LENGTH + 1, dtype=torch.long))


def test_odd_width_is_refused() -> None:
    with pytest.raises(InputError, match="even"):
        ch.build(spec.Model(encoder=builders.stack(7, 1, vocabulary=17, inner=12)))


def test_scale_is_the_root_of_the_head_size() -> None:
    attention = builders.multi_head(WIDTH, HEADS)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    query, key = (getattr(attention, name)(x).unflatten(-1, (HEADS, 3)).transpose(1, 2) for name in ("query", "key"))
    _, weights = attention(x, return_weights=True)
    torch.testing.assert_close(weights, (query @ key.mT / math.sqrt(3)).softmax(-1))
    assert (weights - (query @ key.mT / math.sqrt(WIDTH)).softmax(-1)).abs().max() > 1e-4


class TutorialDropout(nn.Module):
    """The tutorial accepts the rate and ignores it."""

    def __init__(self, drop_prop: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout()


def test_dropout_rate_arrives() -> None:
    assert TutorialDropout(0.1).dropout.p == 0.5
    module = ch.build(builders.transformer(dropout=0.1))
    rates = {submodule.p for submodule in module.modules() if isinstance(submodule, nn.Dropout)}
    assert rates == {0.1}
    # Attention weights may drop inside a fused kernel, without a separate module.
    model = module.spec
    functions = [node for _, node in spec.walk(model) if isinstance(node, spec.Attention | spec.FeedForward)]
    assert {function.dropout for function in functions} == {0.1}
    ids = torch.randint(17, (BATCH, LENGTH))
    module.train()
    assert not torch.equal(module(ids, ids).logits, module(ids, ids).logits)
    module.eval()
    assert torch.equal(module(ids, ids).logits, module(ids, ids).logits)


def tutorial_cross_attention(decoder: Tensor, encoder: Tensor, attention: nn.MultiheadAttention) -> Tensor:
    """The tutorial takes the query from the encoder, key and value from the decoder, and no mask."""
    return decoder + attention(encoder, decoder, decoder, need_weights=False)[0]


def test_cross_attention_direction() -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    decoder, encoder = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    changed = decoder.clone()
    changed[:, -1] += 1.0
    leak = tutorial_cross_attention(changed, encoder, theirs) - tutorial_cross_attention(decoder, encoder, theirs)
    assert leak[:, 0].abs().max() > 1e-4, "the first position read the last target token"
    with pytest.raises(RuntimeError):
        tutorial_cross_attention(decoder[:, :7], encoder, theirs)

    module = ch.build(builders.transformer()).eval()
    source, target = torch.randint(17, (BATCH, LENGTH)), torch.randint(19, (BATCH, 7))
    future = target.clone()
    future[:, -1] = (future[:, -1] + 1) % 19
    ours, after = module(source, target).logits, module(source, future).logits
    assert ours.shape == (BATCH, 7, 19), "source and target have different lengths"
    torch.testing.assert_close(ours[:, :-1], after[:, :-1], atol=1e-6, rtol=0)
    assert (ours[:, -1] - after[:, -1]).abs().max() > 1e-4


def test_ids_are_integers() -> None:
    start = torch.tensor([[50256]])
    assert torch.Tensor([[50256]]).dtype == torch.float32, "as written, an id became a float"
    assert torch.Tensor([[2**24 + 1]]).item() == 2**24, "and is exact only up to 2^24"
    assert start.dtype == torch.int64
    module = ch.build(builders.transformer())
    with pytest.raises(Exception, match=r"(?i)int|type"):
        module.encode(torch.zeros(BATCH, LENGTH))
