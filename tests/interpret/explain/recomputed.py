"""Recompute the forward pass in numpy: every value of an explanation from earlier values and the weights.

Legend: T tokens, S keys, D width, H heads, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from clearhead import spec
from clearhead.core import Transformer
from clearhead.core.kernels.positions import distance_row, relative_bucket, rotary_frequencies
from clearhead.interpret.explain.values import ExplanationSection

Numbers = np.ndarray
_erf = np.vectorize(math.erf)
ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "tanh": np.tanh,
}


def softmax(x: Numbers) -> Numbers:
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


class Recomputed:
    """Forward pass of a model in plain numpy arithmetic.

    Args:
        module: model with the weights.
        ids: name of a stack -> its token ids.
    """

    def __init__(self, module: Transformer, ids: dict[str, Numbers]) -> None:
        self.weights = {name: value.double().numpy() for name, value in module.state_dict().items()}
        self.module, self.ids = module, ids
        self.nodes = dict(spec.walk(module.spec))
        self.stream: dict[str, Numbers] = {}

    def affine(self, x: Numbers, address: str) -> Numbers:
        bias = self.weights.get(f"{address}.bias", 0.0)
        return x @ self.weights[f"{address}.weight"].T + bias

    def norm(self, x: Numbers, address: str, node: object) -> Numbers:
        if isinstance(node, spec.LayerNorm):
            x = x - x.mean(-1, keepdims=True)
        weight = self.weights.get(f"{address}.weight", 0.0 if node.unit_offset else 1.0) + float(node.unit_offset)
        scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + node.eps) * weight
        return scaled + self.weights.get(f"{address}.bias", 0.0)

    def section(self, section: ExplanationSection) -> Iterator[tuple[str, Numbers]]:
        """Yield the name and the recomputed numbers of each value of a section."""
        if section.title == "embedding":
            yield from self._embedding(section)
        elif section.layer is not None:
            yield from self._step(section)
        elif section.title == "after the layers":
            yield from self._behind(section)
        else:
            yield from self._head(section)

    def _stack(self, name: str) -> spec.Stack:
        return getattr(self.module.spec, name)

    def _embedding(self, section: ExplanationSection) -> Iterator[tuple[str, Numbers]]:
        node, address, ids = self._stack(section.stack).embedding, section.address, self.ids[section.stack]
        owner = node.table.path if isinstance(node.table, spec.Reference) else f"{address}.table"
        x = self.weights[f"{owner}.weight"][ids]
        yield "token", x
        if node.scale != 1.0:
            x = x * node.scale
            yield "scaled token", x
        if node.word_norm:
            x = self.norm(x, f"{address}.word_norm", node.word_norm)
            yield "word norm", x
        order = node.projection.place if node.projection else None
        if node.num_segments:
            row = self.weights[f"{address}.segments.weight"][[0] * len(ids)]
            yield "segment", row
            x = x + row
        if node.position:
            row = self._positions(node.position, f"{address}.position", len(ids), x.shape[1])
            yield "position", row
            x = x + row
        if order == "before_norm":
            x = self.affine(x, f"{address}.projection")
            yield "projection", x
        if node.norm:
            x = self.norm(x, f"{address}.norm", node.norm)
            yield "norm of the embedding", x
        if order == "after_norm":
            x = self.affine(x, f"{address}.projection")
            yield "projection", x
        yield "embedded", x
        self.stream[section.stack] = x

    def _positions(self, node: object, address: str, count: int, width: int) -> Numbers:
        if isinstance(node, spec.Learned):
            return self.weights[f"{address}.weight"][node.offset : node.offset + count]
        half = width // 2
        exponent = np.arange(half) / (half - 1 if node.layout == "fairseq" else half)
        angle = (node.offset + np.arange(count))[:, None] * node.theta**-exponent
        if node.layout == "interleaved":
            return np.stack([np.sin(angle), np.cos(angle)], -1).reshape(count, width)
        return np.concatenate([np.sin(angle), np.cos(angle)], -1)

    def _step(self, section: ExplanationSection) -> Iterator[tuple[str, Numbers]]:
        node, stack = self.nodes[section.address], self._stack(section.stack)
        x = before = self.stream[section.stack]
        yield "before", before
        if node.pre:
            x = self.norm(x, f"{section.address}.pre", node.pre)
            yield "norm before the branches", x
        total = before
        for number, branch in enumerate(node.branches):
            branch_address = f"{section.address}.branches.{number}"
            read = x
            if branch.pre:
                read = self.norm(x, f"{branch_address}.pre", branch.pre)
                yield "norm", read
            address, out = f"{branch_address}.function", None
            values = self._attention if isinstance(branch.function, spec.Attention) else self._feed_forward
            for name, out in values(read, address, branch.function, (section, stack)):
                yield name, out
            if branch.post:
                out = self.norm(out, f"{branch_address}.post", branch.post)
                yield "norm of the branch", out
            if branch.scale != 1.0:
                out = out * branch.scale
                yield "scaled branch", out
            total = total + out
        if node.out:
            total = self.norm(total, f"{section.address}.out", node.out)
        yield "after", total
        self.stream[section.stack] = total

    def _attention(
        self, read: Numbers, address: str, node: spec.Attention, location: tuple[ExplanationSection, spec.Stack]
    ) -> Iterator[tuple[str, Numbers]]:
        section, stack = location
        is_memory, heads, size = node.source == "memory", node.num_heads, node.head_size
        source = self.stream["memory"] if is_memory else read
        prepared_by_name = {}
        for name, vectors in (("query", read), ("key", source), ("value", source)):
            projected = self.affine(vectors, f"{address}.{name}").reshape(len(vectors), -1, size).transpose(1, 0, 2)
            yield name, projected.repeat(heads // len(projected), axis=0)
            prepared = self._prepare(projected, f"{address}.{name}_norm", node, name)
            prepared_by_name[name] = prepared.repeat(heads // len(prepared), axis=0)
            if not np.array_equal(prepared, projected):
                yield f"prepared {name}", prepared_by_name[name]
        scale = size**-0.5 if node.scale is None else node.scale
        scores = prepared_by_name["query"] @ prepared_by_name["key"].transpose(0, 2, 1) * scale
        if node.soft_cap:
            scores = node.soft_cap * np.tanh(scores / node.soft_cap)
        if node.score_bias:
            bias = self._bias(prepared_by_name, address, node, (section.stack, stack, scale))
            yield "bias", bias
            scores = scores + bias
        distance = np.arange(scores.shape[1])[:, None] - np.arange(scores.shape[2])
        mask = np.ones_like(distance, dtype=bool)
        if not is_memory and isinstance(node.mask, spec.Causal):
            mask = distance >= 0
        elif not is_memory and isinstance(node.mask, spec.Window):
            mask = (distance <= node.mask.before) & (-distance <= node.mask.after)
        if not is_memory and not isinstance(node.mask, spec.Full):
            yield "mask", mask
        scores = np.where(mask, scores, -np.inf)
        yield "scores", scores
        weights = softmax(scores)
        if node.sink:
            sink = self.weights[f"{address}.sink"][:, None, None]
            weights = np.exp(scores) / (np.exp(scores).sum(-1, keepdims=True) + np.exp(sink))
        yield "weights", weights
        mixed = weights @ prepared_by_name["value"]
        yield "mixed", mixed
        yield "out", self.affine(mixed.transpose(1, 0, 2).reshape(len(read), -1), f"{address}.out")

    def _prepare(self, x_HTE: Numbers, norm: str, node: spec.Attention, name: str) -> Numbers:
        if node.clip is not None:
            x_HTE = x_HTE.clip(-node.clip, node.clip)
        if name == "value":
            return x_HTE
        choice = node.query_key_norm

        def apply_norm(x_HTE: Numbers) -> Numbers:
            if choice is None:
                return x_HTE
            x_THE = x_HTE.transpose(1, 0, 2)
            if choice.over == "width":
                return (
                    self.norm(x_THE.reshape(len(x_THE), -1), norm, choice.norm).reshape(x_THE.shape).transpose(1, 0, 2)
                )
            return self.norm(x_THE, norm, choice.norm).transpose(1, 0, 2)

        is_late = choice is not None and choice.after_rotation
        x_HTE = x_HTE if is_late else apply_norm(x_HTE)
        if node.position is not None:
            x_HTE = self._rotate(x_HTE, node)
        return apply_norm(x_HTE) if is_late else x_HTE

    def _rotate(self, x_HTE: Numbers, node: spec.Attention) -> Numbers:
        rotary, count = node.position, x_HTE.shape[1]
        size = rotary.size or node.head_size
        frequency, magnitude = rotary.theta ** -(np.arange(0, size, 2) / size), 1.0
        if rotary.scaling is not None:
            import torch

            length = torch.full((1, count), count)
            scaled, magnitude = rotary_frequencies(rotary, size, length, torch.device("cpu"))
            frequency = scaled.double().numpy().reshape(-1, size // 2)[-1]
        angle = np.arange(count)[:, None] * frequency
        cos, sin, half = np.cos(angle) * magnitude, np.sin(angle) * magnitude, size // 2
        first, second = x_HTE[..., :half], x_HTE[..., half:size]
        turned = [first * cos - second * sin, second * cos + first * sin, x_HTE[..., size:]]
        return np.concatenate(turned, -1)

    def _bias(
        self, prepared: dict[str, Numbers], address: str, node: spec.Attention, location: tuple[str, spec.Stack, float]
    ) -> Numbers:
        import torch

        name, stack, scale = location
        count = prepared["query"].shape[1]
        distance = np.arange(count)[:, None] - np.arange(count)
        match kind := node.score_bias:
            case spec.Alibi():
                slopes = np.array(kind.slopes or self._slopes(node.num_heads))
                bias = -slopes[:, None, None] * np.abs(distance)
                return bias * scale if kind.scaled else bias
            case spec.Disentangled():
                table = stack.score_table
                rows = self.weights[f"{name}.score_table.weight"]
                if table.norm:
                    rows = self.norm(rows, f"{name}.score_table.norm", table.norm)
                row = distance_row(torch.from_numpy(distance)[None], table)[0].numpy()
                total, projection = 0.0, f"{address}.score_bias.position_"
                for term, content, other, shared in (
                    ("content_to_position", "query", "key", "key"), ("position_to_content", "key", "query", "query"),
                ):  # fmt: skip
                    if term not in kind.terms:
                        continue
                    project = f"{address}.{shared}" if kind.shared_projections else projection + other
                    vectors = self.affine(rows, project).reshape(len(rows), -1, node.head_size).transpose(1, 0, 2)
                    vectors = vectors.repeat(node.num_heads // len(vectors), axis=0)
                    products = prepared[content] @ vectors.transpose(0, 2, 1)
                    query, key = np.indices(row.shape)
                    at = query if content == "query" else key
                    total = total + products[:, at, row]
                return total * scale
            case _:
                is_own = isinstance(kind, spec.RelativeBuckets)
                path = f"{address}.score_bias" if is_own else kind.path
                buckets = kind if is_own else self.nodes[kind.path]
                bucket = relative_bucket(
                    torch.from_numpy(-distance), buckets.count, buckets.max_distance, buckets.bidirectional
                ).numpy()
                return self.weights[f"{path}.weight"][bucket].transpose(2, 0, 1)

    @staticmethod
    def _slopes(heads: int) -> list[float]:
        """Return the default ALiBi slopes: the paper's rule for powers of two, and its interpolation."""
        power = 1
        while 2 * power <= heads:
            power *= 2
        exact = [2 ** (-8 * (head + 1) / power) for head in range(power)]
        between = [2 ** (-8 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)]
        return exact + between[: heads - power]

    def _feed_forward(
        self, read: Numbers, address: str, node: object, location: object
    ) -> Iterator[tuple[str, Numbers]]:
        if isinstance(node, spec.MixtureOfExperts):
            router = self.affine(read, f"{address}.router")
            yield "router", router
            shares, count = softmax(router), node.count
            hidden = np.argsort(-shares, axis=-1)[:, node.top_k :]
            np.put_along_axis(shares, hidden, 0.0, axis=-1)
            if node.router.normalize:
                shares = shares / shares.sum(-1, keepdims=True)
            yield "shares", shares
            outs = [self._expert(read, f"{address}.expert", node.expert, index) for index in range(count)]
            yield "out", sum(shares[:, index, None] * outs[index] for index in range(count))
            return
        up, gate = self.affine(read, f"{address}.up"), None
        yield "up", up
        if node.gated:
            gate = self.affine(read, f"{address}.gate")
            yield "gate", gate
        inner = self._activate(node.activation, up, gate)
        yield "inner", inner
        yield "out", self.affine(inner, f"{address}.down")

    def _expert(self, read: Numbers, address: str, node: spec.FeedForward, index: int) -> Numbers:
        def apply_linear(x: Numbers, name: str) -> Numbers:
            bias = self.weights.get(f"{address}.{name}.bias")
            return x @ self.weights[f"{address}.{name}.weight"][index].T + (0.0 if bias is None else bias[index])

        gate = apply_linear(read, "gate") if node.gated else None
        return apply_linear(self._activate(node.activation, apply_linear(read, "up"), gate), "down")

    @staticmethod
    def _activate(kind: object, up: Numbers, gate: Numbers | None) -> Numbers:
        if isinstance(kind, spec.ClampedGate):
            gate, up = gate.clip(max=kind.limit), up.clip(-kind.limit, kind.limit)
            return (up + 1) * gate / (1 + np.exp(-kind.alpha * gate))
        return ACTIVATIONS[kind](up) if gate is None else ACTIVATIONS[kind](gate) * up

    def _behind(self, section: ExplanationSection) -> Iterator[tuple[str, Numbers]]:
        node, x = self._stack(section.stack), self.stream[section.stack]
        if node.final_norm:
            x = self.norm(x, f"{section.stack}.final_norm", node.final_norm)
            yield "final norm", x
        self.stream[section.stack] = x

    def _head(self, section: ExplanationSection) -> Iterator[tuple[str, Numbers]]:
        x = self.stream["decoder" if self.module.decoder else "encoder"]
        for number, node in enumerate(self.module.spec.head.layers):
            address = f"head.layers.{number}"
            match node:
                case spec.LayerNorm() | spec.RMSNorm():
                    x = self.norm(x, address, node)
                    yield "norm", x
                case spec.Linear():
                    weight = self.weights[f"{address if not node.weight else node.weight.path}.weight"]
                    x = x * node.scale @ weight.T + self.weights.get(f"{address}.bias", 0.0)
                    yield "linear", x
                case spec.Pool():
                    weights = np.arange(1, len(x) + 1)[:, None]
                    kinds = {"mean": x.mean(0), "first": x[0], "last": x[-1], "max": x.max(0)}
                    kinds["weighted"] = (x * weights).sum(0) / weights.sum()
                    x = np.concatenate([kinds[mode] for mode in node.modes])[None]
                    yield "pool", x
                case spec.Activation():
                    x = ACTIVATIONS[node.function](x)
                    yield "function", x
                case spec.SoftCap():
                    x = node.value * np.tanh(x / node.value)
                    yield "function", x
