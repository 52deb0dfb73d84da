"""Models whose heads are set by hand, so that the behaviour of each head is known.

The stream is one-hot: a block for the token, one for the position, and one that layer 0 fills with the token before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import Transformer, build
from clearhead.core.attention import Attention
from clearhead.model.facade import Model
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

POSITIONS, HEADS, SHARP = 61, 3, 40.0


def vocabulary(letters: str = "abcdefghijklmnopqrstuvwxyz .") -> Tokenizer:
    return train_tokenizer("character", [letters], vocab_size=40)


class Blocks:
    """Blocks of the residual stream, and functions that set the weights of heads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.token, self.position = slice(0, size), slice(size, size + POSITIONS)
        self.before = slice(size + POSITIONS, 2 * size + POSITIONS)
        self.width = 2 * size + POSITIONS
        self.head_size = size + POSITIONS
        self.head_token, self.head_position = slice(0, size), slice(size, size + POSITIONS)

    def attention(self, source: str, mask: spec.Mask) -> spec.Attention:
        mask = spec.Full() if source == "memory" else mask
        return spec.Attention(
            source=source, num_heads=HEADS, num_kv_heads=HEADS, head_size=self.head_size, mask=mask, scale=1.0
        )

    def stack(self, mask: spec.Mask, *sources: str, layers: int) -> spec.Stack:
        steps = tuple(spec.Step(branches=(spec.Branch(function=self.attention(source, mask)),)) for source in sources)
        embedding = spec.Embedding(table=spec.Table(rows=self.size), position=spec.Learned(rows=POSITIONS))
        return spec.Stack(width=self.width, embedding=embedding, layers=(spec.Layer(steps=steps),) * layers)

    def head(self, attention: Attention, head: int) -> tuple[Tensor, Tensor]:
        """Return the rows of a head in the query and key projections."""
        rows = slice(head * self.head_size, (head + 1) * self.head_size)
        return attention.query.weight[rows], attention.key.weight[rows]

    def look_at(self, attention: Attention, head: int, offset: int) -> None:
        """Let a head look at the position of the query plus an offset."""
        query, key = self.head(attention, head)
        query[self.head_position, self.position] = SHARP * torch.eye(POSITIONS)
        key[self.head_position, self.position] = torch.eye(POSITIONS).roll(-offset, 0)

    def look_at_first(self, attention: Attention, head: int) -> None:
        query, key = self.head(attention, head)
        query[self.head_position, self.position] = SHARP
        key[self.head_position.start, self.position.start] = 1.0

    def match(self, attention: Attention, head: int, block: slice, *, hidden: int | None = None) -> None:
        """Let a head look at keys with the same token as the query, except at one offset."""
        query, key = self.head(attention, head)
        query[self.head_token, self.token] = SHARP * torch.eye(self.size)
        key[self.head_token, block] = torch.eye(self.size)
        if hidden is not None:
            self.look_at(attention, head, hidden)
            query[self.head_position, self.position] *= -2

    def copy_token(self, attention: Attention, head: int) -> None:
        """Let a head write the token that it looks at into the block of the previous token."""
        rows = slice(head * self.head_size, head * self.head_size + self.size)
        attention.value.weight[rows, self.token] = torch.eye(self.size)
        attention.out.weight[self.before, rows] = torch.eye(self.size)

    def embed(self, module: Transformer) -> None:
        for parameter in module.parameters():
            parameter.zero_()
        for stack in (module.encoder, module.decoder):
            if stack is not None:
                stack.embedding.table.weight[:, self.token] = torch.eye(self.size)
                stack.embedding.position.weight[:, self.position] = torch.eye(POSITIONS)


def attention_of(module: Transformer, path: str) -> Attention:
    attention = module.get_submodule(f"{path}.branches.0.function")
    assert isinstance(attention, Attention)
    return attention


@torch.no_grad()
def one_stack(family: str) -> Model:
    """Return a model with heads: layer 0 previous, first, duplicate token; layer 1 induction, itself, none."""
    tokenizer = vocabulary()
    blocks = Blocks(tokenizer.vocab_size)
    stack = blocks.stack(spec.Causal() if family == "decoder" else spec.Full(), "self", layers=2)
    module = build(spec.Model(**{family: stack})).eval()
    blocks.embed(module)
    first, second = (attention_of(module, f"{family}.layers.{layer}.steps.0") for layer in (0, 1))
    blocks.look_at(first, 0, -1)
    blocks.copy_token(first, 0)
    blocks.look_at_first(first, 1)
    blocks.match(first, 2, blocks.token, hidden=0)
    blocks.match(second, 0, blocks.before, hidden=1)  # the next token, too, comes after this one
    blocks.look_at(second, 1, 0)
    kind = "generate" if family == "decoder" else "embed"
    return Model(module, TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind=kind))


@torch.no_grad()
def two_stacks(*, joint: bool = True) -> Model:
    """Return a model whose cross-attention looks at the token to copy, the first token, and the last token read."""
    tokenizer = vocabulary()
    blocks = Blocks(tokenizer.vocab_size)
    model = spec.Model(
        encoder=blocks.stack(spec.Full(), "self", layers=1),
        decoder=blocks.stack(spec.Causal(), "self", "memory", layers=1),
    )
    module = build(model).eval()
    blocks.embed(module)
    memory = attention_of(module, "decoder.layers.0.steps.1")
    blocks.look_at(memory, 0, 0)
    blocks.look_at_first(memory, 1)
    blocks.match(memory, 2, blocks.token)
    other = tokenizer if joint else vocabulary("zyxwvutsrqponmlkjihgfedcba .")
    return Model(module, TokenizerPair(tokenizer, other, joint), TaskRecord(kind="translate"))
