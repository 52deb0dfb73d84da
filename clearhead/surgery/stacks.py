"""From one family to another: an encoder that gets a decoder, a decoder that sees both sides, another head."""

from __future__ import annotations

from clearhead import spec
from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.surgery.addresses import redirect_references
from clearhead.surgery.plan import Origin, SurgeryPlan, apply_plan, task_of, unchanged_origins
from clearhead.surgery.report import AnyModel, EditedModel


def to_encoder_decoder(model: AnyModel) -> EditedModel[AnyModel]:
    """Make an encoder-decoder of an encoder: its decoder is a copy under a causal mask, with a memory to attend to.

    The attention to the memory is drawn; all else of the decoder is a copy, and words are read from the encoder's
    table. A head that scores words stays, else a new one scores them.

    Args:
        model: a module or a model with an encoder alone; it is not changed.

    Raises:
        InputError: the model has a decoder, or nothing in its layers attends.

    Source: arXiv 1907.12461, section 3.
    """
    return apply_plan(model, _plan_decoder, task=task_of)


def to_encoder(model: AnyModel, *, head: spec.Head | None = None) -> EditedModel[AnyModel]:
    """Make an encoder of a decoder, whose tokens then see both sides; of two stacks the encoder is what stays.

    Biases of scores for what comes later begin as those for what came before.

    Args:
        model: a module or a model with a decoder; it is not changed.
        head: of the new model; parts that the old head has in the same place are kept. None: no head.

    Raises:
        InputError: there is no decoder, the head does not fit, or positions count from the first token.

    Source: arXiv 2404.05961, section 2.
    """
    return apply_plan(model, lambda module: _plan_encoder(module, head), task=task_of)


def replace_head(model: AnyModel, head: spec.Head | None) -> EditedModel[AnyModel]:
    """Put another head on a model; parts that the old head has in the same place are kept.

    Args:
        model: a module or a model; it is not changed.
        head: the new one; None: states are all that is given.

    Raises:
        InputError: the head does not fit the states; every fault is named.
    """
    return apply_plan(
        model,
        lambda module: _with_head(module.spec, unchanged_origins(module), module.spec.head, head),
        task=task_of,
    )


def _with_head(
    model: spec.Model, origins: dict[str, Origin], old: spec.Head | None, head: spec.Head | None
) -> SurgeryPlan:
    """Put a head on a planned model; layers of the old one stay as long as all before them are the same."""
    kept = {address: origin for address, origin in origins.items() if not address.startswith("head.")}
    for index, (before, after) in enumerate(
        zip(old.layers if old is not None else (), head.layers if head is not None else (), strict=False)
    ):
        if before != after:
            break
        prefix = f"head.layers.{index}."
        kept |= {address: origin for address, origin in origins.items() if address.startswith(prefix)}
    return SurgeryPlan(model.model_copy(update={"head": head}), kept)


# --- an encoder that gets a decoder ---------------------------------------------------------------------------


def _plan_decoder(module: Transformer) -> SurgeryPlan:
    model = module.spec
    if model.decoder is not None or model.encoder is None:
        raise InputError("this model has a decoder already; what becomes an encoder-decoder is an encoder alone")
    encoder = model.encoder
    names: dict[str, str] = {}
    layers = []
    for index, layer in enumerate(encoder.layers):
        steps: list[spec.Step] = []
        for number, step in enumerate(layer.steps):
            place = f"layers.{index}.steps"
            names[f"decoder.{place}.{len(steps)}."] = f"encoder.{place}.{number}."
            steps.append(step)
            asking = _self_attention(step)
            if asking is not None:
                steps.append(_memory_step(layer, step, asking))
        layers.append(spec.Layer(steps=tuple(steps)))
    if not any(_self_attention(step) for layer in encoder.layers for step in layer.steps):
        raise InputError("no layer of the encoder attends to anything, so that there is no attention to make one of")
    embedding = encoder.embedding.model_copy(update={"table": spec.Reference(path=_words_of(encoder))})
    stack = encoder.model_copy(update={"layers": tuple(layers), "embedding": embedding})
    decoder = redirect_references(_causal(stack), lambda path: _moved(path, names, encoder))
    origins = unchanged_origins(module)
    for address in list(origins):
        if address.startswith("encoder.") and not address.startswith("encoder.embedding.table."):
            origins[_moved(address, names, encoder)] = Origin(address)
    head = _word_head(model.head, encoder)
    whole = model.model_copy(update={"decoder": decoder})
    return _with_head(whole, origins, model.head, head)


def _self_attention(step: spec.Step) -> tuple[spec.Branch, spec.Attention] | None:
    for branch in step.branches:
        if isinstance(branch.function, spec.Attention) and branch.function.source == "self":
            return branch, branch.function
    return None


def _memory_step(layer: spec.Layer, step: spec.Step, asking: tuple[spec.Branch, spec.Attention]) -> spec.Step:
    """Return a step like another, that attends to the memory: its norms stand where those of the other do."""
    branch, attention = asking
    norm = attention.query_key_norm
    is_disentangled = isinstance(attention.score_bias, spec.Disentangled)
    memory = attention.model_copy(
        update={
            "source": "memory",
            "mask": spec.Full(),
            "position": None,
            "score_bias": None,
            "sink": False,
            # Scores that no distance takes part in are sums of fewer terms.
            "scale": None if is_disentangled else attention.scale,
            "query_key_norm": None if norm is None else norm.model_copy(update={"after_rotation": False}),
        }
    )
    pre = branch.pre or step.pre
    if pre is None and step.out is None:
        # A first layer whose states the embedding has normed already: what follows finds them summed with others.
        pre = next((one.pre for each in layer.steps for one in each.branches if one.pre is not None), None)
    made = spec.Branch(function=memory, pre=pre, post=branch.post, scale=branch.scale, dropout=branch.dropout)
    return spec.Step(branches=(made,), out=step.out)


def _moved(path: str, names: dict[str, str], encoder: spec.Stack) -> str:
    """Return where the decoder has what the encoder has at a path; words are the encoder's for both."""
    if path == _words_of(encoder) or not path.startswith("encoder."):
        return path
    for new, old in names.items():
        if path.startswith(old):
            return new + path.removeprefix(old)
    return f"decoder.{path.removeprefix('encoder.')}"


def _words_of(encoder: spec.Stack) -> str:
    table = encoder.embedding.table
    return table.path if isinstance(table, spec.Reference) else "encoder.embedding.table"


def _causal(stack: spec.Stack) -> spec.Stack:
    def change(_: str, node: spec.Node) -> spec.Node:
        if isinstance(node, spec.Full):
            return spec.Causal()
        if isinstance(node, spec.Window):
            return spec.Window(before=node.before, after=0)
        return node

    def attend(path: str, node: spec.Node) -> spec.Node:
        return spec.map_nodes(node, change) if isinstance(node, spec.Attention) and node.source == "self" else node

    return spec.map_nodes(stack, attend)


def _word_head(head: spec.Head | None, encoder: spec.Stack) -> spec.Head:
    """Return the head where it scores words, else one that does, by the table itself where that is as wide."""
    table = encoder.embedding.table
    assert isinstance(table, spec.Table), "a stack alone owns its table"
    layers = head.layers if head is not None else ()
    maps = [layer for layer in layers if isinstance(layer, spec.Linear)]
    is_pooled = any(isinstance(layer, spec.Pool) for layer in layers)
    if head is not None and maps and not is_pooled and maps[-1].size == table.rows:
        return head
    weight = spec.Reference(path="encoder.embedding.table") if encoder.table_width == encoder.output_width else None
    return spec.Head(layers=(spec.Linear(size=table.rows, bias=False, weight=weight),))


# --- a decoder that sees both sides ---------------------------------------------------------------------------


def _plan_encoder(module: Transformer, head: spec.Head | None) -> SurgeryPlan:
    model = module.spec
    if model.decoder is None:
        raise InputError("this model is an encoder already")
    if model.encoder is not None:
        return _plan_first_stack(module, model.encoder, head)
    _refuse_rounded(model.decoder)

    def rename(path: str) -> str:
        return f"encoder.{path.removeprefix('decoder.')}" if path.startswith("decoder.") else path

    stack = redirect_references(_bidirectional(model.decoder), rename)
    origins = {rename(address): origin for address, origin in unchanged_origins(module).items()}
    mirrored = [path for path, node in spec.walk(model.decoder, "decoder") if _looks_back(node)]
    for path in mirrored:
        origins[f"{rename(path)}.weight"] = Origin(f"{path}.weight", lambda old, _: old.repeat(2, 1))
    old_head = None if model.head is None else redirect_references(model.head, rename)
    new_head = None if head is None else redirect_references(head, rename)
    notes = ("scores for later tokens begin as those for earlier ones at the same distance",) if mirrored else ()
    whole = model.model_copy(update={"encoder": stack, "decoder": None})
    planned = _with_head(whole, origins, old_head, new_head)
    return SurgeryPlan(planned.model, planned.origins, notes)


def _plan_first_stack(module: Transformer, encoder: spec.Stack, head: spec.Head | None) -> SurgeryPlan:
    """Keep the encoder of two stacks; a table that it borrows becomes its own."""
    origins = {
        address: origin for address, origin in unchanged_origins(module).items() if not address.startswith("decoder.")
    }
    table = encoder.embedding.table
    if isinstance(table, spec.Reference):
        owner = dict(spec.walk(module.spec))[table.path]
        assert isinstance(owner, spec.Table)
        encoder = encoder.model_copy(update={"embedding": encoder.embedding.model_copy(update={"table": owner})})
        origins["encoder.embedding.table.weight"] = Origin(f"{table.path}.weight")
    whole = module.spec.model_copy(update={"encoder": encoder, "decoder": None})
    return _with_head(whole, origins, module.spec.head, head)


def _looks_back(node: spec.Node) -> bool:
    return isinstance(node, spec.RelativeBuckets) and not node.bidirectional


def _refuse_rounded(decoder: spec.Stack) -> None:
    for path, node in spec.walk(decoder, "decoder"):
        if isinstance(node, spec.Alibi) and node.rounding != "none":
            raise InputError(
                f"{path}: the penalty is rounded and counts from the first token, which says nothing of later ones; "
                "only a decoder can have it"
            )


def _bidirectional(stack: spec.Stack) -> spec.Stack:
    """Return a stack whose tokens see both sides, as far behind them as before them."""

    def change(_: str, node: spec.Node) -> spec.Node:
        if isinstance(node, spec.Causal | spec.Prefix):
            return spec.Full()
        if isinstance(node, spec.Window):
            return spec.Window(before=node.before, after=max(node.before, node.after))
        if isinstance(node, spec.RelativeBuckets) and not node.bidirectional:
            # Half of twice as many buckets number earlier distances as all of them did.
            return node.model_copy(update={"bidirectional": True, "count": 2 * node.count})
        return node

    return spec.map_nodes(stack, change)
