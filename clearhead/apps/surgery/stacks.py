"""Surgery on stacks: convert an encoder to an encoder-decoder or a decoder to an encoder, or replace the head."""

from __future__ import annotations

from clearhead import spec
from clearhead.apps.surgery.addresses import redirect_references, token_output, word_table
from clearhead.apps.surgery.plan import Origin, SurgeryPlan, apply_plan, copy_origins, task_of
from clearhead.apps.surgery.report import AnyModel, EditedModel
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError
from clearhead.core import Transformer


@check_types
def to_encoder_decoder(model: AnyModel) -> EditedModel[AnyModel]:
    """Make an encoder-decoder from an encoder: the decoder is a copy with a causal mask and new cross-attention.

    The cross-attention is initialized randomly. The rest of the decoder is a copy; both share the token embedding. A
    language-model head stays; any other head is replaced by a language-model head.

    Args:
        model: a module or a model with only an encoder; it is not changed.

    Raises:
        InputError: the model has a decoder, or its layers have no self-attention.

    Source: arXiv 1907.12461, section 3.
    """
    return apply_plan(model, _plan_decoder, task=task_of)


@check_types
def to_encoder(model: AnyModel, *, head: spec.Head | None = None) -> EditedModel[AnyModel]:
    """Make an encoder from a decoder by removing its causal mask, or take the encoder of an encoder-decoder.

    Score biases for later tokens begin as copies of those for earlier tokens.

    Args:
        model: a module or a model with a decoder; it is not changed.
        head: the head of the new model; its first layers keep the weights of equal layers of the old head. None means
            no head.

    Raises:
        InputError: there is no decoder, the head does not fit, or positions count from the first token.

    Source: arXiv 2404.05961, section 2.
    """
    return apply_plan(model, lambda module: _plan_encoder(module, head), task=task_of)


@check_types
def replace_head(model: AnyModel, head: spec.Head | None) -> EditedModel[AnyModel]:
    """Replace the head of a model; its first layers keep the weights of equal layers of the old head.

    Args:
        model: a module or a model; it is not changed.
        head: the new head. None means that the outputs are hidden states.

    Raises:
        InputError: the head does not fit the hidden states; the message names every fault.
    """
    return apply_plan(
        model,
        lambda module: _with_head(module.spec, copy_origins(module), module.spec.head, head),
        task=task_of,
    )


def _with_head(
    model: spec.Model, origins: dict[str, Origin], old: spec.Head | None, head: spec.Head | None
) -> SurgeryPlan:
    """Plan a model with another head; its first layers keep the weights of equal first layers of the old head."""
    remaining = {address: origin for address, origin in origins.items() if not address.startswith("head.")}
    layers = [() if side is None else side.layers for side in (old, head)]
    for index, (before, after) in enumerate(zip(*layers, strict=False)):
        if before != after:
            break
        prefix = f"head.layers.{index}."
        remaining |= {address: origin for address, origin in origins.items() if address.startswith(prefix)}
    return SurgeryPlan(model.model_copy(update={"head": head}), remaining)


# --- an encoder that gets a decoder ---------------------------------------------------------------------------


def _plan_decoder(module: Transformer) -> SurgeryPlan:
    model = module.spec
    if model.decoder is not None or model.encoder is None:
        raise InputError("this model has a decoder already: use a model that has only an encoder")
    encoder = model.encoder
    names: dict[str, str] = {}
    layers = []
    for index, layer in enumerate(encoder.layers):
        steps: list[spec.Step] = []
        for number, step in enumerate(layer.steps):
            step_prefix = f"layers.{index}.steps"
            names[f"decoder.{step_prefix}.{len(steps)}."] = f"encoder.{step_prefix}.{number}."
            steps.append(step)
            if (attended := _self_attention(step)) is not None:
                steps.append(_memory_step(layer, step, attended))
        layers.append(spec.Layer(steps=tuple(steps)))
    if not any(_self_attention(step) for layer in encoder.layers for step in layer.steps):
        raise InputError("no layer of the encoder has self-attention, so cross-attention cannot follow")
    table, _ = word_table(model, "encoder")

    def move_path(path: str) -> str:
        """Return the decoder address for an encoder address; the shared token embedding keeps its address."""
        if path.removesuffix(".weight") == table or not path.startswith("encoder."):
            return path
        targets = (new + path.removeprefix(old) for new, old in names.items() if path.startswith(old))
        return next(targets, f"decoder.{path.removeprefix('encoder.')}")

    embedding = encoder.embedding.model_copy(update={"table": spec.Reference(path=table)})
    stack = encoder.model_copy(update={"layers": tuple(layers), "embedding": embedding})
    whole = model.model_copy(update={"decoder": redirect_references(_causal(stack), move_path)})
    origins = copy_origins(module)
    origins |= {move_path(address): Origin(address) for address in origins}
    return _with_head(whole, origins, model.head, _word_head(model, encoder))


def _self_attention(step: spec.Step) -> tuple[spec.Branch, spec.Attention] | None:
    for branch in step.branches:
        if isinstance(branch.function, spec.Attention) and branch.function.source == "self":
            return branch, branch.function
    return None


def _memory_step(layer: spec.Layer, step: spec.Step, attended: tuple[spec.Branch, spec.Attention]) -> spec.Step:
    """Return a cross-attention step for a decoder layer, with norms at the same places as in a self-attention step."""
    branch, attention = attended
    norm = attention.query_key_norm
    is_disentangled = isinstance(attention.score_bias, spec.Disentangled)
    memory = attention.model_copy(
        update={
            "source": "memory",
            "mask": spec.Full(),
            "position": None,
            "score_bias": None,
            "sink": False,
            # Disentangled scores sum more terms, so their scale does not fit plain scores.
            "scale": None if is_disentangled else attention.scale,
            "query_key_norm": None if norm is None else norm.model_copy(update={"after_rotation": False}),
        }
    )
    pre = branch.pre or step.pre
    if pre is None and step.out is None:
        # The embedding normalizes the input of the first layer; later branches need their own norm.
        pre = next((other.pre for sibling in layer.steps for other in sibling.branches if other.pre is not None), None)
    attend = spec.Branch(function=memory, pre=pre, post=branch.post, scale=branch.scale, dropout=branch.dropout)
    return spec.Step(branches=(attend,), out=step.out)


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


def _word_head(model: spec.Model, encoder: spec.Stack) -> spec.Head:
    """Return the old language-model head, or else a new one, tied to the token embedding if their widths agree."""
    path, table = word_table(model, "encoder")
    output = token_output(model.head)
    if model.head is not None and output is not None and output[1].size == table.rows:
        return model.head
    weight = spec.Reference(path=path) if encoder.table_width == encoder.width else None
    return spec.Head(layers=(spec.Linear(size=table.rows, bias=False, weight=weight),))


# --- a decoder without a causal mask ---------------------------------------------------------------------------


def _plan_encoder(module: Transformer, head: spec.Head | None) -> SurgeryPlan:
    model = module.spec
    if model.decoder is None:
        raise InputError("this model is an encoder already: use a model that has a decoder")
    if model.encoder is not None:
        return _plan_first_stack(module, model.encoder, head)
    _refuse_rounded(model.decoder)

    def rename(path: str) -> str:
        return f"encoder.{path.removeprefix('decoder.')}" if path.startswith("decoder.") else path

    stack = redirect_references(_bidirectional(model.decoder), rename)
    origins = {rename(address): origin for address, origin in copy_origins(module).items()}
    notes: tuple[str, ...] = ()
    for path, node in spec.walk(model.decoder, "decoder"):
        if isinstance(node, spec.RelativeBuckets) and not node.bidirectional:
            origins[f"{rename(path)}.weight"] = Origin(f"{path}.weight", lambda old, _: old.repeat(2, 1))
            notes = ("score biases for later tokens begin as copies of those for earlier tokens at the same distance",)
    old_head = None if model.head is None else redirect_references(model.head, rename)
    new_head = None if head is None else redirect_references(head, rename)
    whole = model.model_copy(update={"encoder": stack, "decoder": None})
    planned = _with_head(whole, origins, old_head, new_head)
    return SurgeryPlan(planned.model, planned.origins, notes)


def _plan_first_stack(module: Transformer, encoder: spec.Stack, head: spec.Head | None) -> SurgeryPlan:
    """Plan an encoder from an encoder-decoder; a token embedding that the decoder owns moves to the encoder."""
    origins = {
        address: origin for address, origin in copy_origins(module).items() if not address.startswith("decoder.")
    }
    if isinstance(encoder.embedding.table, spec.Reference):
        path, table = word_table(module.spec, "encoder")
        encoder = encoder.model_copy(update={"embedding": encoder.embedding.model_copy(update={"table": table})})
        origins["encoder.embedding.table.weight"] = Origin(f"{path}.weight")
    whole = module.spec.model_copy(update={"encoder": encoder, "decoder": None})
    return _with_head(whole, origins, module.spec.head, head)


def _refuse_rounded(decoder: spec.Stack) -> None:
    for path, node in spec.walk(decoder, "decoder"):
        if isinstance(node, spec.Alibi) and node.rounding != "none":
            raise InputError(
                f"{path}: a rounded penalty counts from the first token and is undefined for later ones; only a "
                "decoder can have it"
            )


def _bidirectional(stack: spec.Stack) -> spec.Stack:
    """Return a stack without causal masks; windows extend as far after a token as before the token."""

    def change(_: str, node: spec.Node) -> spec.Node:
        if isinstance(node, spec.Causal):
            return spec.Full()
        if isinstance(node, spec.Window):
            return spec.Window(before=node.before, after=max(node.before, node.after))
        if isinstance(node, spec.RelativeBuckets) and not node.bidirectional:
            # Of twice the buckets, one half covers earlier tokens, as all of them did before.
            return node.model_copy(update={"bidirectional": True, "count": 2 * node.count})
        return node

    return spec.map_nodes(stack, change)
