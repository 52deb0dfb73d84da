"""Decompose an attention score into terms, one per pair of components that contribute to query and key.

Every vector of the residual stream is a sum over the components that wrote it, here called writers. These are the
embedding rows, the heads and feed-forward networks of the lower layers, and biases. The mean and variance of every
norm are fixed at their values in this run. Then query and key are linear in the stream, and their product is a sum
over all pairs of writers.

Legend: W writers, P positions, D width, H heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.kernels.positions import rotate
from clearhead.core.norm import LayerNorm, Norm
from clearhead.core.stack import Branch, Layer, Stack, Step
from clearhead.interpret.explain.forward import Forward


@dataclass(frozen=True)
class Writer:
    """Component that adds a vector to the residual stream.

    Args:
        component: "token", "position", "segment"; "self-attention", "cross-attention", "feed-forward"; or "bias" for
            the biases of all projections and norms together.
        stack: "encoder" or "decoder".
        layer: depth of the layer in its stack. None means below the layers.
        head: number of the head. None means that the component has no heads.
    """

    component: str
    stack: str
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        layer_text = "" if self.layer is None else f" of layer {self.layer}"
        return (
            f"{self.component}{layer_text}" if self.head is None else f"head {self.head}{layer_text} ({self.component})"
        )


BIAS = "bias"


class NonlinearNorm(Exception):
    """Raised if a score depends on a custom norm, which may be nonlinear; the message is the class name of the norm."""

    @property
    def sentence(self) -> str:
        """End of a sentence that begins with "Why token A looks at token B"."""
        return f"cannot be split into terms: the custom norm {self} may be nonlinear."


def _has_linear_norm(norm: nn.Module) -> bool:
    """Return whether a module is a built-in norm, which is linear while its statistics are held fixed.

    Raises:
        NonlinearNorm: the module is a custom norm.
    """
    if isinstance(norm, Norm | nn.Identity):
        return isinstance(norm, Norm)
    raise NonlinearNorm(type(norm).__name__)


@dataclass(frozen=True)
class ScoreTerms:
    """Terms of one attention score, before a soft cap and a mask.

    Args:
        score: the score: the sum of all terms and of the position bias.
        query_writers, key_writers: writers of the query and of the key.
        terms: term of each pair of writers.
        position_bias: score bias of this query and key, such as ALiBi or a relative-position table; 0 without one.
    """

    score: float
    query_writers: tuple[Writer, ...]
    key_writers: tuple[Writer, ...]
    terms: Float64[Tensor, "query_writers key_writers"]
    position_bias: float

    def by_query(self) -> list[tuple[Writer, float]]:
        """Return the sum of terms of each writer of the query, the largest magnitude first."""
        return _sort_terms(self.query_writers, self.terms.sum(1))

    def by_key(self) -> list[tuple[Writer, float]]:
        """Return the sum of terms of each writer of the key, the largest magnitude first."""
        return _sort_terms(self.key_writers, self.terms.sum(0))

    def tables(self, most: int) -> dict[str, list[tuple[str, float]]]:
        """Return three tables of the largest terms: by query writer, by key writer, and by pair.

        The last row of a table sums the remaining terms, so each table adds up to the score without the position bias.

        Args:
            most: most terms that a table lists.
        """
        by_writer = {"what wrote the query": self.by_query(), "what wrote the key": self.by_key()}
        tables = {title: [(f"{writer}", value) for writer, value in terms] for title, terms in by_writer.items()}
        tables["pairs of writers"] = [
            (f"{query_writer} × {key_writer}", value) for query_writer, key_writer, value in self.pairs()
        ]
        for title, terms in tables.items():
            rest = terms[most:]
            others = [(f"{len(rest)} others", sum(value for _, value in rest))] if rest else []
            tables[title] = terms[:most] + others
        return tables

    def pairs(self) -> list[tuple[Writer, Writer, float]]:
        """Return every pair of writers with its term, the largest magnitude first."""
        order = self.terms.abs().flatten().argsort(descending=True, stable=True).tolist()
        columns = len(self.key_writers)
        places = [divmod(index, columns) for index in order]
        return [(self.query_writers[q], self.key_writers[k], float(self.terms[q, k])) for q, k in places]


@torch.no_grad()
def score_terms(forward: Forward, attention_key: tuple[str, str, int], head: int, query: int, key: int) -> ScoreTerms:
    """Decompose the attention score of a query and a key into terms; terms and position bias sum to the score.

    The decomposed score is the one before a soft cap, a mask and a custom score step.

    Args:
        forward: captured forward pass.
        attention_key: name of the stack, source of the attention ("self" or "memory"), and depth of its layer.
        head: number of the query head.
        query, key: positions of the two tokens.

    Raises:
        NonlinearNorm: the query or the key depends on a custom norm.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", query-key circuits.
    """
    stack, source, depth = attention_key
    record = forward.record(stack, source, depth)
    query_vectors = _VectorTerms(forward, attention_key).vectors("query", query, head)
    key_vectors = _VectorTerms(forward, attention_key).vectors("key", key, record.kv_head(head))
    scale = record.attention.scale
    terms = torch.stack(list(query_vectors.values())) @ torch.stack(list(key_vectors.values())).T * scale
    bias = record.bias(slice(query, query + 1))
    position_bias = 0.0 if bias is None else float(bias[0].expand(record.num_heads, -1, -1)[head, 0, key])
    product = record.query_BHTE[0, head, query].double() @ record.key_BKSE[0, record.kv_head(head), key].double()
    score = float(product) * scale + position_bias
    return ScoreTerms(score, tuple(query_vectors), tuple(key_vectors), terms, position_bias)


class _StreamTerms:
    """Residual stream of a stack at one position, split into one vector per writer, and updated layer step by step.

    Args:
        forward: captured forward pass.
        stack: name of the stack.
        position: position of the token.
    """

    def __init__(self, forward: Forward, stack: str, position: int) -> None:
        self.forward, self.name, self.position = forward, stack, position
        self.stack: Stack = getattr(forward.module, stack)
        self.terms: dict[Writer, Tensor] = {}
        self._embed()

    def run_to(self, depth: int, source: str) -> tuple[Step, str]:
        """Compute the terms before the step at `depth` that attends to `source`; return this step and its address."""
        for layer_depth, index in enumerate(self.stack.order):
            layer = self.stack.layers[index]
            assert isinstance(layer, Layer)
            for number, step in enumerate(layer.steps):
                assert isinstance(step, Step)
                address = f"{self.name}.layers.{index}.steps.{number}"
                if layer_depth == depth and _attention_to(step, source) is not None:
                    return step, address
                self._run(step, address, layer_depth)
        raise AssertionError(f"no step at depth {depth} of the {self.name} attends to {source}")

    def run_to_the_end(self) -> None:
        """Compute the terms after all layers and the final norm."""
        for depth, index in enumerate(self.stack.order):
            layer = self.stack.layers[index]
            assert isinstance(layer, Layer)
            for number, step in enumerate(layer.steps):
                assert isinstance(step, Step)
                self._run(step, f"{self.name}.layers.{index}.steps.{number}", depth)
        address = f"{self.name}.layers.{self.stack.order[-1]}.after"
        x_D = self._at(address, len(self.stack.order) - 1)
        self.norm(self.stack.final_norm, x_D)

    def norm(self, norm: nn.Module, x_D: Tensor) -> None:
        """Pass the vector of every writer through a norm that uses the mean and variance of `x_D`."""
        if _has_linear_norm(norm):
            assert isinstance(norm, Norm)
            self.terms = {writer: _apply_norm(norm, term, x_D) for writer, term in self.terms.items()}
            self._add_bias(norm.bias)

    def linear(self, linear: nn.Module) -> None:
        """Pass the vector of every writer through a linear layer; its bias becomes a term of the writer "bias"."""
        if isinstance(linear, nn.Linear):
            self.terms = {writer: linear.weight.double() @ term for writer, term in self.terms.items()}
            self._add_bias(linear.bias)

    def _at(self, address: str, depth: int = 0) -> Tensor:
        return self.forward.at(address, depth)[self.position].double()

    def _write(self, writer: Writer, vector: Tensor) -> None:
        self.terms[writer] = self.terms[writer] + vector if writer in self.terms else vector

    def _add_bias(self, bias: Tensor | None) -> None:
        if bias is not None:
            self._write(Writer(BIAS, self.name), bias.double())

    def _embed(self) -> None:
        embedding, address = self.stack.embedding, f"{self.name}.embedding"
        ids = self.forward.ids(self.name)
        row_D = embedding.rows.weight[ids[self.position]].double() * embedding.scale
        self.terms[Writer("token", self.name)] = row_D
        self.norm(embedding.word_norm, row_D)
        for component, module in (("segment", embedding.segments), ("position", embedding.position)):
            if module is not None:
                x_TD = self.forward.at(f"{address}.{component}{'s' * (component == 'segment')}").expand(len(ids), -1)
                self._write(Writer(component, self.name), x_TD[self.position].double())
        if embedding.project_at == "before_norm":
            self.linear(embedding.projection)
        self.norm(embedding.norm, sum(self.terms.values(), torch.zeros(())))
        if embedding.project_at == "after_norm":
            self.linear(embedding.projection)

    def _run(self, step: Step, address: str, depth: int) -> None:
        """Add the branch outputs of a sublayer to the residual stream, and apply the norm after the sum, if any."""
        x_D = self._at(f"{address}.before", depth)
        for number, branch in enumerate(step.branches):
            assert isinstance(branch, Branch)
            branch_address = f"{address}.branches.{number}"
            x_D = x_D + self._at(branch_address, depth)
            self._add(branch, f"{branch_address}.function", depth)
        self.norm(step.out, x_D)

    def _add(self, branch: Branch, address: str, depth: int) -> None:
        function, out_D = branch.function, self._at(address, depth)
        written: dict[Writer, Tensor] = {}
        bias: Tensor | None = None
        if isinstance(function, Attention):
            mixed_HE = self.forward.at(f"{address}.mixed", depth)[:, self.position].double()
            weight_DHE = function.out.weight.double().unflatten(1, mixed_HE.shape)
            component = "cross-attention" if function.spec.source == "memory" else "self-attention"
            heads_HD = torch.einsum("dhe,he->hd", weight_DHE, mixed_HE)
            written = {Writer(component, self.name, depth, head): vector for head, vector in enumerate(heads_HD)}
            bias = function.out.bias
        else:
            written[Writer("feed-forward", self.name, depth)] = out_D
        if bias is not None:
            written[Writer(BIAS, self.name)] = bias.double()
        for writer, vector in written.items():
            if _has_linear_norm(branch.post):
                assert isinstance(branch.post, Norm)
                vector = _apply_norm(branch.post, vector, out_D)
            self._write(writer, vector * branch.scale)
        if isinstance(branch.post, Norm) and branch.post.bias is not None:
            self._add_bias(branch.post.bias * branch.scale)


class _VectorTerms:
    """Splits queries or keys of one attention into one vector per writer of the residual stream.

    Args:
        forward: captured forward pass.
        attention_key: name of the stack, source of the attention, and depth of its layer.
    """

    def __init__(self, forward: Forward, attention_key: tuple[str, str, int]) -> None:
        self.forward, (self.stack, self.source, self.depth) = forward, attention_key
        self.record = forward.record(*attention_key)

    def vectors(self, name: str, position: int, head: int) -> dict[Writer, Tensor]:
        """Return the vector [E] that each writer contributes to a query or a key.

        Args:
            name: "query" or "key".
            position: position of the token.
            head: number of the query head, or of the key/value head.
        """
        attention, depth = self.record.attention, self.depth
        is_memory = self.source == "memory" and name == "key"
        stream = _StreamTerms(self.forward, "encoder" if is_memory else self.stack, position)
        if is_memory:
            stream.run_to_the_end()
        else:
            step, address = stream.run_to(depth, self.source)
            branch = _attention_to(step, self.source)
            assert branch is not None
            x_D = self.forward.at(f"{address}.before", depth)[position].double()
            stream.norm(step.pre, x_D)
            read_D = self.forward.at(f"{address}.pre", depth)[position].double()
            stream.norm(branch.pre, read_D)
        stream.linear(getattr(attention, name))
        projected = self.forward.at(f"{self.record.address}.{name}", depth)[position].double()
        if (clip := attention.spec.clip) is not None:
            clip_factor = projected.clamp(-clip, clip) / projected.where(projected != 0, 1.0)
            stream.terms = {writer: term * clip_factor for writer, term in stream.terms.items()}
            projected = projected.clamp(-clip, clip)
        return self._prepare_terms(stream.terms, name, position, head, projected)

    def _prepare_terms(
        self, terms: dict[Writer, Tensor], name: str, position: int, head: int, projected: Tensor
    ) -> dict[Writer, Tensor]:
        """Apply norm and rotation to the terms [heads * E] of a query or key; return the terms of one head."""
        attention, choice = self.record.attention, self.record.attention.spec.query_key_norm
        size, norm = attention.spec.head_size, getattr(attention, f"{name}_norm")
        total = Writer("all", self.stack)  # next to its terms: the norm takes its statistics from the sum
        terms_by_writer = {
            writer: term.unflatten(0, (-1, size)) for writer, term in {**terms, total: projected}.items()
        }
        if choice is None:
            terms_by_writer = self._rotate_terms(terms_by_writer, position)
        elif choice.after_rotation:
            terms_by_writer = self._norm_terms(norm, self._rotate_terms(terms_by_writer, position), total)
        else:
            terms_by_writer = self._rotate_terms(self._norm_terms(norm, terms_by_writer, total), position)
        return {writer: vector_HE[head] for writer, vector_HE in terms_by_writer.items() if writer != total}

    def _rotate_terms(self, parts: dict[Writer, Tensor], position: int) -> dict[Writer, Tensor]:
        attention, rotary = self.record.attention, self.record.attention.spec.position
        if rotary is None:
            return parts
        cos, sin = (table[:, :, position : position + 1] for table in attention.angles(rotary, self.record.context))
        return {writer: rotate(term[None, :, None], cos, sin)[0, :, 0] for writer, term in parts.items()}

    def _norm_terms(self, norm: nn.Module, parts: dict[Writer, Tensor], whole: Writer) -> dict[Writer, Tensor]:
        _has_linear_norm(norm)
        assert isinstance(norm, Norm)
        choice, x_HE = self.record.attention.spec.query_key_norm, parts[whole]
        assert choice is not None
        # A norm over the width treats all heads as one vector.
        axes = (-1,) if choice.over == "width" else x_HE.shape
        x = x_HE.reshape(axes)
        normed = {writer: _apply_norm(norm, term.reshape(axes), x).view_as(x_HE) for writer, term in parts.items()}
        if norm.bias is not None:
            bias_HE = norm.bias.double().expand(axes if axes != (-1,) else x.shape).reshape(x_HE.shape)
            for writer in (Writer(BIAS, self.stack), whole):
                normed[writer] = normed.get(writer, torch.zeros_like(x_HE)) + bias_HE
        return normed


def _attention_to(step: Step, source: str) -> Branch | None:
    for branch in step.branches:
        assert isinstance(branch, Branch)
        if isinstance(branch.function, Attention) and branch.function.spec.source == source:
            return branch
    return None


def _apply_norm(norm: Norm, term: Tensor, x: Tensor) -> Tensor:
    """Apply a norm without its bias to one term of x, with the mean and variance of x."""
    weight = 1.0 if norm.weight is None else norm.weight.double() + float(norm.has_unit_offset)
    if isinstance(norm, LayerNorm):
        term, x = term - term.mean(-1, keepdim=True), x - x.mean(-1, keepdim=True)
    return term * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight


def _sort_terms(writers: tuple[Writer, ...], values: Tensor) -> list[tuple[Writer, float]]:
    terms = list(zip(writers, values.tolist(), strict=True))
    return sorted(terms, key=lambda term: -abs(term[1]))
