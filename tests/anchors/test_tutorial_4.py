"""Tutorial 4, a notebook from embeddings to training, with width 300, 4 heads and an inner size of 64.

anchor              test
4.1                 test_embedding_is_a_lookup
4.2                 test_size_of_a_large_table
4.3, 4.b3           test_sinusoidal_figures
4.4                 test_attention_example
4.5, 4.b5           test_softmax_example
4.6, 4.8            test_attention_shapes
4.7                 test_cost_is_the_square_of_the_length
4.10                test_feed_forward_example
4.11                test_feed_forward_shape
4.12, 4.b11         test_layer_norm_example
4.13, 4.14          test_whole_transformer
4.15                test_padding_and_look_ahead_masks
4.16                test_loss_goes_down
4.b4                test_odd_width_is_refused
4.b7 [run]          test_fully_masked_row_is_zero
4.b8 [run]          test_one_polarity
4.b9 [run]          test_masks_belong_to_the_shifted_input
4.b10               test_source_padding_is_never_attended
4.b14               test_output_layer_and_ties
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core.context import Masking
from clearhead.core.feedforward import FeedForward
from clearhead.core.kernels.positions import sinusoidal_table
from clearhead.core.norm import LayerNorm
from tests.anchors import builders

WIDTH, HEADS, INNER = 300, 4, 64
CPU = torch.device("cpu")


def close(actual: Tensor, printed: list[float] | list[list[float]], digits: int = 4) -> None:
    """Compare with printed figures, to half a unit of the last digit plus float rounding."""
    torch.testing.assert_close(actual, torch.tensor(printed), atol=0.51 * 10**-digits, rtol=0)


def test_embedding_is_a_lookup() -> None:
    stack = builders.stack(4, 1, vocabulary=5, inner=8)
    embedding = stack.embedding.model_copy(update={"position": None, "scale": 1.0})
    stack = stack.model_copy(update={"width": 3, "embedding": embedding, "layers": ()})
    module = ch.build(spec.Model(encoder=stack))
    table = torch.arange(1, 16).view(5, 3) / 10
    module.load_state_dict({"encoder.embedding.table.weight": table})
    hidden = module(torch.tensor([[2, 4]])).hidden
    close(hidden[0, 0], [0.7, 0.8, 0.9])
    assert len(hidden[0, 0]) == 3
    assert torch.equal(hidden[0, 1], table[4])


def test_size_of_a_large_table() -> None:
    """A million rows of 300, counted without allocating them."""
    with torch.device("meta"):
        module = ch.build(spec.Model(encoder=builders.stack(WIDTH, HEADS, vocabulary=1_000_000, inner=INNER)))
    table = dict(module.named_parameters())["encoder.embedding.table.weight"]
    assert table.numel() == 300_000_000
    small = ch.build(spec.Model(encoder=builders.stack(WIDTH, HEADS, vocabulary=17, inner=INNER)))
    assert small(torch.tensor([[0, 1, 2]])).hidden.shape == (1, 3, WIDTH)


def tutorial_position(position: int, width: int) -> Tensor:
    """The index in the tutorial's worked example already counts in twos, but is doubled again."""
    row = torch.zeros(width)
    for index in range(0, width, 2):
        angle = position / 10000 ** (2 * index / width)
        row[index], row[index + 1] = math.sin(angle), math.cos(angle)
    return row


def test_sinusoidal_figures() -> None:
    correct = [0.90930, -0.41615, 0.95231, -0.30515, 0.98045, -0.19678, 0.99570, -0.09260, 0.99998, 0.00634]
    ours = sinusoidal_table(3, WIDTH, spec.Sinusoidal())[2]
    close(ours[:10], correct, digits=5)
    close(sinusoidal_table(3, 4, spec.Sinusoidal())[2], [0.9093, -0.4161, 0.0200, 0.9998])
    wrong = tutorial_position(2, WIDTH)
    close(wrong[:4], [0.90930, -0.41615, 0.98045, -0.19678], digits=5)
    assert (wrong - ours).abs().max() > 0.1
    # The tutorial's class, which disagrees with its example, is right.
    rates = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
    torch.testing.assert_close(
        ours, torch.stack([(2 * rates).sin(), (2 * rates).cos()], 1).flatten(), atol=1e-6, rtol=0
    )


def test_attention_example() -> None:
    """Two queries over two keys of size three; values have size two, so the third output column stays empty."""
    query = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    key = torch.tensor([[1.0, 2.0, 1.0], [2.0, 1.0, 0.0]])
    value = torch.tensor([[0.5, 0.8], [0.2, 0.3]])
    assert (query @ key.T).tolist() == [[2.0, 2.0], [3.0, 1.0]]
    attention = builders.multi_head(3, 1, bias=False)
    # The memory is what the value projection reads, too: choose the map from keys to values.
    key_to_value = torch.linalg.lstsq(key, F.pad(value, (0, 1))).solution
    with torch.no_grad():
        for name in ("query", "key", "out"):
            nn.init.eye_(attention.get_submodule(name).weight)
        attention.get_submodule("value").weight.copy_(key_to_value.T)
    out, weights = attention(query[None], key[None], return_weights=True)
    close(weights[0, 0], [[0.5, 0.5], [0.7604, 0.2396]])
    close(out[0, :, :2], [[0.35, 0.55], [0.4281, 0.6802]])


def test_softmax_example() -> None:
    """Scores 2, 4, 5 in our attention; the naive formula agrees here, and overflows for large scores."""

    def ours(scores: Tensor) -> Tensor:
        attention = builders.multi_head(2, 1, bias=False, scale=1.0)
        with torch.no_grad():
            for name in ("query", "key", "value", "out"):
                nn.init.eye_(attention.get_submodule(name).weight)
        memory = torch.stack([scores, torch.zeros_like(scores)], dim=-1)
        weights: Tensor = attention(torch.tensor([[[1.0, 0.0]]]), memory[None], return_weights=True)[1]
        return weights.flatten()

    scores = torch.tensor([2.0, 4.0, 5.0])
    naive = scores.exp() / scores.exp().sum()
    close(ours(scores), [0.0351, 0.2595, 0.7054])
    torch.testing.assert_close(naive, ours(scores))
    large = scores + 100
    assert (large.exp() / large.exp().sum()).isnan().any()
    torch.testing.assert_close(ours(large), ours(scores))


def test_attention_shapes() -> None:
    x = torch.randn(1, 3, WIDTH)
    for heads in (1, HEADS):
        out, weights = builders.multi_head(WIDTH, heads)(x, return_weights=True)
        assert (out.shape, weights.shape) == ((1, 3, WIDTH), (1, heads, 3, 3))
    assert WIDTH // HEADS == 75


def test_cost_is_the_square_of_the_length() -> None:
    for tokens, scores in ((12, 144), (24, 576)):
        _, weights = builders.multi_head(4, 1)(torch.randn(1, tokens, 4), return_weights=True)
        assert weights.numel() == scores


def test_feed_forward_example() -> None:
    """The table of anchors keeps the results only; input and weights are chosen here to lead to them."""
    layer = FeedForward(4, spec.FeedForward(size=2))
    with torch.no_grad():
        layer.up.weight.copy_(torch.tensor([[0.2, 0.3, 0.1, 0.2], [0.1, 0.2, 0.3, -0.1]]))
        layer.up.bias.copy_(torch.tensor([0.08, 0.06]))
        layer.down.weight.copy_(torch.tensor([[0.4, 0.2], [0.1, -0.4], [0.4, 0.1], [0.2, 0.4]]))
        layer.down.bias.copy_(torch.tensor([0.24, -0.06, 0.08, 0.01]))
    x = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    close(layer.up(x).relu()[0, 0], [0.27, 0.16])
    close(layer(x)[0, 0], [0.3800, -0.0970, 0.2040, 0.1280])


def test_feed_forward_shape() -> None:
    layer = FeedForward(WIDTH, spec.FeedForward(size=INNER))
    assert layer(torch.randn(1, 3, WIDTH)).shape == (1, 3, WIDTH)
    assert sum(p.numel() for p in layer.parameters()) == 2 * WIDTH * INNER + INNER + WIDTH


def tutorial_layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """The tutorial's standard deviation divides by n - 1, and its epsilon is outside the root."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)


def test_layer_norm_example() -> None:
    x = torch.tensor([2.0, -1.0, 3.0, 0.0])
    close(tutorial_layer_norm(x), [0.5477, -1.0954, 1.0954, -0.5477])
    ours = LayerNorm((4,), spec.LayerNorm())(x)
    close(ours, [0.6325, -1.2649, 1.2649, -0.6325])
    torch.testing.assert_close(ours, nn.LayerNorm(4)(x))
    # Inside the root, epsilon bounds what noise in a constant input can become.
    noise = torch.tensor([1e-5, -1e-5, 1e-5, -1e-5])
    assert tutorial_layer_norm(noise).abs().max() > 0.5
    assert LayerNorm((4,), spec.LayerNorm())(noise).abs().max() < 0.01


def test_whole_transformer() -> None:
    model = builders.transformer(
        WIDTH, HEADS, inner=INNER, layers=12, source_vocabulary=10_000, target_vocabulary=10_000, dropout=0.1
    )
    module = ch.build(model).eval()
    assert sum(parameter.numel() for parameter in module.parameters()) == 22_979_536
    source, target = torch.randint(10_000, (64, 30)), torch.randint(10_000, (64, 20))
    with torch.inference_mode():
        memory = module.encode(source).memory
        out = module.decode(target, memory)
    assert memory.shape == (64, 30, WIDTH)
    assert out.hidden.shape == (64, 20, WIDTH)
    assert out.logits.shape == (64, 20, 10_000)
    with torch.inference_mode():
        assert module(source[:1, :3], target[:1, :3]).hidden.shape == (1, 3, WIDTH)


SOURCE = torch.tensor([[7, 5, 3, 0, 0], [1, 2, 3, 4, 0]])
TARGET = torch.tensor([[1, 2, 3, 4, 0], [4, 3, 2, 1, 5]])
BLOCKED = ["01111", "00111", "00011", "00001", "00001"]


def rows_of_blocked(allowed_TS: Tensor) -> list[str]:
    return ["".join("0" if may else "1" for may in row) for row in allowed_TS.tolist()]


def test_padding_and_look_ahead_masks() -> None:
    padding = Masking(5, 5, key_mask=SOURCE != 0).build(spec.Full(), CPU)
    combined = Masking(5, 5, key_mask=TARGET != 0).build(spec.Causal(), CPU)
    assert padding is not None
    assert combined is not None
    assert padding.shape == (2, 1, 1, 5)
    assert combined.shape == (2, 1, 5, 5)
    assert (~padding[0, 0, 0]).long().tolist() == [0, 0, 0, 1, 1]
    assert rows_of_blocked(combined[0, 0]) == BLOCKED


def test_loss_goes_down() -> None:
    """The tutorial's hparams: teacher forcing, cross-entropy without padding, Adam 1e-4, betas .9 and .98, eps 1e-9."""
    module = ch.build(builders.transformer(20, 2, inner=24, source_vocabulary=29, target_vocabulary=31))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    source, target = torch.randint(1, 29, (7, 11)), torch.randint(1, 31, (7, 6))
    losses = []
    for _ in range(25):
        logits = module(source, target[:, :-1], mask=source != 0, target_mask=target[:, :-1] != 0).logits
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
    assert losses == sorted(losses, reverse=True)


def test_odd_width_is_refused() -> None:
    with pytest.raises(RuntimeError):  # the tutorial has 3 sines and 3 cosines for 2 odd columns
        torch.zeros(1, 5)[:, 1::2].copy_(torch.zeros(1, 3))
    with pytest.raises(InputError, match="even"):
        sinusoidal_table(10, 5, spec.Sinusoidal())


def tutorial_weights(scores: Tensor, blocked: Tensor) -> Tensor:
    """The tutorial adds a large negative number, in place."""
    scores += blocked * -1e9
    return scores.softmax(dim=-1)


def test_fully_masked_row_is_zero() -> None:
    blocked = torch.ones(1, 4)
    uniform = tutorial_weights(torch.randn(1, 4), blocked)
    close(uniform, [[0.25, 0.25, 0.25, 0.25]])
    assert tutorial_weights(torch.randn(1, 4).half(), blocked.half()).isnan().all()

    x = torch.randn(2, 5, 12, requires_grad=True)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, 0, 2] = False
    for dtype in (torch.float32, torch.float16):
        attention = builders.multi_head(12, 3).to(dtype)
        out, weights = attention(x.to(dtype), mask=mask, return_weights=True)
        fused = attention(x.to(dtype), mask=mask)
        assert weights[0, :, 2].eq(0).all()
        for values in (out, fused):
            # Nothing was mixed, so only the output's bias is left.
            torch.testing.assert_close(values[0, 2], attention.get_submodule("out").bias, atol=0, rtol=0)
            assert values.isfinite().all()
        gradients = torch.autograd.grad(fused.float().square().sum(), [x, *attention.parameters()])
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_one_polarity() -> None:
    """The tutorial uses 1 for padding in one mask and for visible in the other; a maximum combines both."""
    padding = (TARGET[:1] == 0)[:, None, None, :].long()
    look_ahead = torch.ones(5, 5, dtype=torch.long).tril()
    blocked = torch.maximum(padding, look_ahead[None, None])
    seen = tutorial_weights(torch.zeros(1, 1, 5, 5), blocked)[0, 0] > 0
    assert all(not row[: index + 1].any() for index, row in enumerate(seen[:3])), "only the future is seen"

    module = ch.build(builders.transformer(12, 3, layers=2)).eval()
    source, target = torch.randint(1, 17, (1, 7)), TARGET[:1]
    base = module(source, target, target_mask=target != 0).logits
    for changed in range(5):
        other = target.clone()
        other[0, changed] = 9
        moved = (module(source, other, target_mask=target != 0).logits - base)[0].abs().amax(dim=-1) > 1e-6
        # Position i changes if and only if it may attend to the changed token; rows of padding are not compared.
        assert moved[:4].tolist() == [changed <= index < 4 and changed < 4 for index in range(4)]


def tutorial_train_step(target: Tensor) -> Tensor:
    """The tutorial makes the masks from the whole target, but the decoder reads all but its last token."""
    mask = (target != 0)[:, None, :] & torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
    states = F.embedding(target[:, :-1], torch.randn(19, 6))
    scores = states @ states.mT
    return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ states


def test_masks_belong_to_the_shifted_input() -> None:
    module = ch.build(builders.transformer())
    source, target = torch.randint(1, 17, (2, 7)), TARGET
    with pytest.raises(RuntimeError, match="must match"):
        tutorial_train_step(target)
    with pytest.raises(Exception, match=r"(?i)shape|length|mask|size|type"):
        module(source, target[:, :-1], target_mask=target != 0)
    shifted = target[:, :-1]
    logits = module(source, shifted, target_mask=shifted != 0).logits
    assert logits.shape == (2, 4, 19)
    F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0).backward()


def test_source_padding_is_never_attended() -> None:
    """The tutorial's decoder attends to source padding: no mask is passed to its cross-attention."""
    module = ch.build(builders.transformer(12, 3, layers=2)).eval()
    source, target = torch.randint(1, 17, (2, 5)), torch.randint(1, 19, (2, 7))
    padded = torch.cat([source, torch.zeros(2, 3, dtype=torch.long)], dim=1)
    mask = torch.arange(8).expand(2, 8) < 5
    short, long = module(source, target).logits, module(padded, target, mask=mask).logits
    torch.testing.assert_close(long, short, atol=1e-5, rtol=1e-5)
    attended = module(padded, target).logits
    assert (attended - short).abs().max() > 1e-3, "without a mask padding is read, which the mask must prevent"


def test_output_layer_and_ties() -> None:
    """The output layer belongs to the model, not the decoder, and can be tied to the decoder's embedding."""
    free = builders.transformer(target_vocabulary=19)
    assert free.decoder is not None
    shared = spec.Linear(size=19, bias=False, weight=spec.Reference(path="decoder.embedding.table"))
    tied = free.model_copy(update={"head": spec.Head(layers=(shared,))})

    def size(model: spec.Model) -> int:
        return sum(parameter.numel() for parameter in ch.build(model).parameters())

    assert size(free) - size(tied) == 19 * free.decoder.width + 19
    module = ch.build(tied)
    assert not any(name.startswith("head") for name, _ in module.named_parameters())
