"""`AttentionMaps`: attention of a model over one text, with methods to save, draw and show it.

Legend: L layers, H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, key
from clearhead.base.files import refuse_unwritable, replacing
from clearhead.base.progress import Notify
from clearhead.core import Transformer
from clearhead.core.head import Head
from clearhead.fast.computing import replica_in_dtype
from clearhead.fast.stored import stored_matrices
from clearhead.generate.batching import check_lengths
from clearhead.interpret.maps.attention_run import AttentionRun
from clearhead.interpret.maps.head_statistics import query_chunks
from clearhead.interpret.maps.map_inputs import MapInputs, predicts_text
from clearhead.interpret.maps.page import SampleOptions, explorer_page
from clearhead.interpret.maps.recording import AttentionRecord, record_first_layer, record_states
from clearhead.interpret.view.arrays import MAPS
from clearhead.interpret.view.explorer.write import frame_html, write_page
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair

NOTEBOOK_HEIGHT = 720  # pixels
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@check_types
class AttentionMaps(AttentionRun):
    """Attention of one run of a model, for every stack, layer and head; a notebook displays it as an explorer page."""

    def with_module(self, module: Transformer) -> AttentionMaps:
        """Return the attention of another model over the same tokens.

        Args:
            module: model with the same vocabulary, such as another checkpoint of a run.

        Raises:
            InputError: the model has fewer positions than the text has tokens.
        """
        for read in filter(None, (self.inputs.source, self.inputs.target)):
            check_lengths(read.ids.tolist(), module.max_positions, noun="text")
        return attend(module, self.tokenizers, self.task, self.inputs)

    def save(
        self,
        path: str | Path,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        force: bool = False,
    ) -> None:
        """Write tokens and weights as a .npz file that `numpy.load` reads.

        The file has `tokens`. With two stacks it also has `target_tokens`. If the decoder writes text, it also has
        `written_tokens`, the rows of "decoder.memory". Each stack, such as "decoder.self", has weights [layers, heads,
        queries, keys] in float32, with NaN for a head that a layer does not have. The arrays "decoder.self.layers" and
        "decoder.self.heads" are the numbers of these layers and heads. The entries `format` and `clearhead` are the
        versions of the format and of the library.
        `clearhead.view_attention` shows the file.

        Args:
            path: .npz file to write.
            layers, heads: layers and heads to write. None means all.
            force: True to replace an existing file.

        Raises:
            InputError: a layer or head does not exist, the weights are too large, or the file exists or cannot be
                written.
        """
        path = Path(path)
        if path.suffix != ".npz":
            raise InputError(f"the file of attention weights must end in .npz, got {path}")
        refuse_unwritable(path, force=force)
        arrays = arrays_of(self, layers, heads)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.savez(file, **arrays)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror or error}") from None

    def save_picture(
        self,
        path: str | Path,
        *,
        view: str = "matrix",
        stack: str | None = None,
        layer: int | None = None,
        head: int | None = None,
        force: bool = False,
    ) -> None:
        """Draw attention as a .png or .svg picture.

        Args:
            path: .png or .svg file to write.
            view: "matrix" draws one head, with the tokens on both axes; "overview" draws every head as a thumbnail.
            stack: one of `stacks`. None means the only stack, or all stacks in an overview.
            layer, head: layer and head of a matrix, from 0. None means that the view is an overview.
            force: True to replace an existing file.

        Raises:
            InputError: the view, stack, layer or head does not exist, or an argument is missing. The text has too many
                tokens for a picture. The file exists or cannot be written.
        """
        # Not at the top: half a second of matplotlib for every command that loads a model.
        from clearhead.interpret.view.attention import draw_matrix

        if view not in ("matrix", "overview"):
            raise InputError(f"the view of a picture must be matrix or overview, got '{view}'")
        refuse_unwritable(Path(path), force=force)
        if stack is not None:
            self.layers(stack)
        one_head = key("layer") + " and " + key("head")
        if view == "overview":
            if layer is not None or head is not None:
                raise InputError("an overview shows all layers and heads: leave " + one_head + " out")
            names = self.stacks if stack is None else (stack,)
            chosen = [self.record(name, number) for name in names for number in self.layers(name)]
            draw_record_overview(chosen, Path(path), title="Attention of each head")
            return
        stack = self.stacks[0] if stack is None and len(self.stacks) == 1 else stack
        if stack is None or layer is None or head is None:
            stacks = ", ".join(self.stacks)
            raise InputError("a matrix shows one head: give " + key("stack") + f" ({stacks}), " + one_head)
        weights = self.weights(stack, layer, head).numpy()
        title = f"{stack}, layer {layer}, head {head}"
        row = "token being written" if stack == "decoder.memory" and self.written_ids else "query token"
        draw_matrix(weights, *self._labels(stack), Path(path), title=title, row=row)

    def save_html(
        self,
        path: str | Path,
        *,
        title: str = "attention",
        options: SampleOptions | None = None,
        notify: Notify | None = None,
        force: bool = False,
    ) -> None:
        """Write the attention explorer with every head, as one HTML file that needs no network.

        Args:
            path: HTML file to write.
            title: heading of the page.
            options: options for the content of the page. None means all content that needs no further run of the model.
            notify: function called with the numbers of measured and of all heads. None means the current progress
                display.
            force: True to replace an existing file.

        Raises:
            InputError: a layer, head or output does not exist, the page would have too many weights, or the file exists
                or cannot be written.
        """
        refuse_unwritable(Path(path), force=force)
        write_page(explorer_page(title, [("", self)], options, notify=notify), Path(path))

    def _repr_html_(self) -> str:
        return frame_html(explorer_page("attention", [("", self)]), height=NOTEBOOK_HEIGHT)

    def to_json(self, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None) -> dict[str, Any]:
        """Return tokens and weights as JSON values.

        Args:
            layers, heads: layers and heads to return. None means all.

        Raises:
            InputError: a layer or head does not exist, or the weights are too large.
        """
        chosen = self.choose(layers, heads)
        rows = [
            {
                "stack": record.stack,
                "layer": record.layer,
                "head": head,
                "weights": record.weights([head])[0, 0].tolist(),
            }
            for record, head_numbers in chosen
            for head in head_numbers
        ]
        return {**self.token_lists(), "attention": rows}


def arrays_of(
    maps: AttentionMaps, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the named arrays of a .npz file with tokens and weights; see `AttentionMaps.save`.

    Args:
        maps: attention maps of one run.
        layers, heads: layers and heads to include. None means all.

    Raises:
        InputError: a layer or head does not exist, or the weights are too large.
    """
    chosen = maps.choose(layers, heads)
    arrays: dict[str, Any] = MAPS.header()
    for name, tokens in maps.token_lists().items():
        if tokens is not None:
            arrays[name] = np.array(tokens)
    for stack in dict.fromkeys(record.stack for record, _ in chosen):
        stack_records = [(record, head_numbers) for record, head_numbers in chosen if record.stack == stack]
        numbers = sorted({head for _, head_numbers in stack_records for head in head_numbers})
        query, key = stack_records[0][0].query_BHTE, stack_records[0][0].key_BKSE
        weights_LHTS = np.full(
            (len(stack_records), len(numbers), query.shape[2], key.shape[2]), np.nan, dtype=np.float32
        )
        for row, (record, head_numbers) in enumerate(stack_records):
            weights_LHTS[row, [numbers.index(head) for head in head_numbers]] = (
                record.weights(head_numbers)[0].cpu().numpy()
            )
        arrays[stack] = weights_LHTS
        arrays[f"{stack}.layers"] = np.array([record.layer for record, _ in stack_records])
        arrays[f"{stack}.heads"] = np.array(numbers)
    return arrays


def attend(module: Transformer, tokenizers: TokenizerPair, task: TaskRecord, inputs: MapInputs) -> AttentionMaps:
    """Run a model once on the inputs of its stacks, and return its attention.

    Args:
        module: model to run, in evaluation mode; its training mode is restored afterwards.
        tokenizers: tokenizers of the model.
        task: task that the model was trained for.
        inputs: inputs of the model's stacks.
    """
    records, hidden_1TD = record_states(module, inputs.source, inputs.target)
    # Predict now: edits of the model end with the context manager around this call.
    next_id = None
    if predicts_text(module, task) and module.head is not None:
        next_id = _most_probable(module.head, hidden_1TD, tokenizers.target.vocab_size)
    return AttentionMaps(module, tokenizers, task, inputs, records, next_id)


@torch.no_grad()
def _most_probable(head: Head, hidden_1TD: Float[Tensor, "1 tokens width"], entries: int) -> int:
    """Return the id of the most probable token after the last token that the last stack reads.

    The head may have more outputs than the vocabulary has entries; the additional outputs are ignored.
    """
    return int(head(hidden_1TD[:, -1:])[0, 0, :entries].argmax())


def attend_first_layer(
    module: Transformer, tokenizers: TokenizerPair, task: TaskRecord, inputs: MapInputs
) -> AttentionMaps:
    """Return attention maps with only the self-attention of the lowest layer; for the arguments, see `attend`."""
    return AttentionMaps(module, tokenizers, task, inputs, record_first_layer(module, inputs.source))


def in_precision(module: Transformer, precision: str) -> Transformer:
    """Return the module itself if it computes in a precision, otherwise a replica that does.

    Args:
        module: module to convert.
        precision: fp32, bf16, or auto to keep the dtype of the module.

    Raises:
        InputError: the precision is none of these.
    """
    if precision == "auto":
        return module
    if precision not in _DTYPES:
        raise InputError(f"precision must be auto, fp32 or bf16, got '{precision}'")
    dtype = _DTYPES[precision]
    stored = stored_matrices(module)
    dtypes = {parameter.dtype for address, parameter in module.named_parameters() if address[:-7] not in stored}
    if dtypes <= {dtype}:
        return module
    return replica_in_dtype(module, dtype)


THUMBNAIL = 64
"""Most cells on each side of a thumbnail; a cell shows the largest weight of its tokens."""


def draw_record_overview(records: Sequence[AttentionRecord], path: Path, *, title: str) -> None:
    """Draw one picture with a thumbnail of the weights of every head of the given attentions.

    Args:
        records: attentions to draw; those of a stack follow each other.
        path: .png or .svg file to write.
        title: one line above the picture.
    """
    from clearhead.interpret.view.attention import StackThumbnails, draw_overview  # imports matplotlib

    stacks = []
    for name in dict.fromkeys(record.stack for record in records):
        stack_records = [record for record in records if record.stack == name]
        heads = [thumbnails(record).numpy() for record in stack_records]
        stacks.append(StackThumbnails(name, [record.layer for record in stack_records], heads))
    draw_overview(stacks, path, title=title)


def thumbnails(record: AttentionRecord) -> Float[Tensor, "heads rows columns"]:
    """Return a thumbnail of the attention weights of each head, with at most `THUMBNAIL` cells on a side.

    Args:
        record: attention over a single text.
    """
    device = record.query_BHTE.device
    bin_T, bin_S = (_bins(size, device) for size in (record.query_BHTE.shape[2], record.key_BKSE.shape[2]))
    rows, columns = int(bin_T[-1]) + 1, int(bin_S[-1]) + 1
    small_HNN = torch.zeros(record.num_heads, rows, columns, device=device)
    for queries, weights_BHTS in query_chunks(record):
        weights_HTS = weights_BHTS[0]
        narrow_HTN = weights_HTS.new_zeros(*weights_HTS.shape[:2], columns)
        narrow_HTN.scatter_reduce_(2, bin_S.expand_as(weights_HTS), weights_HTS, "amax")
        small_HNN.scatter_reduce_(1, bin_T[queries, None].expand_as(narrow_HTN), narrow_HTN, "amax")
    return small_HNN.cpu()


def _bins(size: int, device: torch.device) -> Tensor:
    """Return the row or column number of the thumbnail that each token belongs to."""
    return torch.arange(size, device=device) * min(size, THUMBNAIL) // size
