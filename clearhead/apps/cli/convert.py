"""`clearhead convert`: save a model for other tools, quantize it, or convert pickled weights to safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.apps.cli.console import print_either, print_message
from clearhead.apps.cli.options import Json, locate_model
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from clearhead.checkpoints.weights.files import Stream
    from clearhead.model.facade import Model

Format = Annotated[str | None, typer.Option("--to", metavar="FORMAT", help="The layout to write: hf.")]
FromBin = Annotated[
    bool,
    typer.Option(
        "--from-bin", help="Convert pytorch_model.bin or nanoGPT's ckpt.pt, with PyTorch's restricted reader."
    ),
]
TokenizerPath = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="PATH", help="For ckpt.pt: a tokenizer's folder or file, or meta.pkl."),
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", metavar="PRECISION", help="Write clearhead's layout in bf16, int8 or int4."),
]
Calibration = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="For int4: texts that decide which matrices stay in 8 bits."),
]
ShardSize = Annotated[
    str | None,
    typer.Option("--max-shard-size", metavar="SIZE", help="The maximum size of a file, such as 500MB; by default 5GB."),
]
Push = Annotated[
    str | None, typer.Option("--push", metavar="OWNER/NAME", help="Also upload it to the Hugging Face hub.")
]
_PRECISIONS = ("bf16", "int8", "int4")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def convert(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A run directory, a checkpoint's folder, or a hub name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    to: Format = None,
    from_bin: FromBin = False,
    tokenizer: TokenizerPath = None,
    precision: Precision = None,
    text: Calibration = None,
    max_shard_size: ShardSize = None,
    push: Push = None,
    as_json: Json = False,
) -> None:
    """Save a model for other tools, or in fewer bits.

    \b
    Example:
      clearhead convert runs/de-en exported --to hf
      clearhead convert runs/de-en exported --to hf --push owner/de-en
      clearhead convert downloads/opus-mt-de-en opus-mt-de-en --from-bin
      clearhead convert out/ckpt.pt shakespeare --from-bin --tokenizer meta.pkl
      clearhead convert runs/de-en de-en-int8 --precision int8
      clearhead convert runs/stories small --precision int4 --text sample.txt

    --to hf writes config.json, safetensors and the tokenizer in the form that transformers reads. It uses the first
    model type that can express the model, or reports why none can. Weights keep their dtype. Above --max-shard-size
    they are split into shards with an index. Option --from-bin reads pickled weights, which no other command does, and
    writes the same folder with safetensors. A ckpt.pt of nanoGPT becomes a folder for clearhead. Its tokenizer is
    meta.pkl in the same folder, or the one of --tokenizer. Option --precision writes a folder for clearhead with
    rounded weights. With bf16, weights have 16 bits. With int8, they have 8 bits and take a
    quarter of the space. With int4, they have 4 bits in the layers, and 8 bits in embedding tables and the output
    layer. With --text, int4 measures the loss on a file, keeps the matrices that lose most in 8 bits, and prints the
    loss before and after. Without --text, a model is converted one tensor at a time and need not fit into memory.
    README.md is the model card. Option --push uploads the files, with the token of HF_TOKEN or `hf auth login`. With
    --json, the last line is {"path", "format"}, with "model_type" for --to hf and "commit" for --push.
    """
    from clearhead.base.files import refuse_unwritable_place

    _check_options(to, from_bin, tokenizer, precision, text, max_shard_size)
    if push is not None:
        from clearhead.model.saving import refuse_bad_repository

        if from_bin:
            raise InputError("--push does not work with --from-bin: leave one of them out")
        refuse_bad_repository(push)
    size = None if max_shard_size is None else _parse_size(max_shard_size)
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    refuse_unwritable_place(out)
    record = {"path": str(out), "format": to or precision or "safetensors"}
    if from_bin:
        record["format"] = _convert_bin(ref, out, tokenizer)
    else:
        record |= _convert(ref, out, push, precision=precision, text=text, max_shard_size=size)
    print_either(as_json, record, *filter(None, [str(out), record.get("commit")]))


def _check_options(
    to: str | None,
    from_bin: bool,
    tokenizer: Path | None,
    precision: str | None,
    text: Path | None,
    max_shard_size: str | None,
) -> None:
    """Refuse options that are not known or do not go together."""
    if [from_bin, to is not None, precision is not None].count(True) != 1:
        raise InputError("choose one output: --to hf, --from-bin, or --precision bf16, int8 or int4")
    if precision not in (None, *_PRECISIONS):
        raise InputError(f"--precision {precision} is unknown; expected {' or '.join(_PRECISIONS)}")
    if text is not None and precision != "int4":
        raise InputError("--text has an effect with --precision int4 only; leave it out")
    if to not in (None, "hf"):
        raise InputError(f"--to {to} is unknown; expected hf")
    if tokenizer is not None and not from_bin:
        raise InputError("--tokenizer has an effect with --from-bin and nanoGPT's ckpt.pt only; leave it out")
    if to is None and max_shard_size is not None:
        raise InputError("--max-shard-size has an effect with --to hf only; leave it out")


def _convert(
    ref: str, out: Path, push: str | None, *, precision: str | None, text: Path | None, max_shard_size: int | None
) -> dict[str, str]:
    """Write a model, upload it if --push is given, and return its model type and the commit of the upload."""
    from clearhead.base.files import read_json_object

    resolved_ref = locate_model(ref)
    from clearhead.checkpoints.hf.saving import LARGEST_SHARD
    from clearhead.model.saving import push_model, write_model

    size, record = max_shard_size or LARGEST_SHARD, dict[str, str]()
    layout = "hf" if precision is None else "clearhead"
    model, weights = _open(resolved_ref, precision) if text is None else _calibrate(resolved_ref, text)
    write_model(model, out, out.name, layout, size, weights())
    if precision is None:
        record["model_type"] = str(read_json_object(out / "config.json", what="a config.json")["model_type"])
        print_message(f"written as {record['model_type']}")
    if push is not None:
        record["commit"] = push_model(model, push, layout, size, weights())
    return record


def _open(ref: str, precision: str | None) -> tuple[Model, Callable[[], Stream | None]]:
    """Open a model; return it with a function that streams its weights, or returns None if they are in memory."""
    from clearhead.checkpoints.hf.saving import can_stream
    from clearhead.checkpoints.reference import ModelReference
    from clearhead.fast.memory import FORMATS
    from clearhead.model.loading import load_as_stored
    from clearhead.model.opening import change_form, lossless_form, open_model

    opened = open_model(ModelReference.locate(ref))
    if precision is not None:
        return change_form(opened, next(choice.form for choice in FORMATS if choice.precision == precision), ref)
    if can_stream(opened.model.module, opened.model.task, opened.model.hf_checkpoint):
        return change_form(opened, lossless_form(opened), ref)
    return load_as_stored(ref), lambda: None


def _calibrate(ref: str, text: Path) -> tuple[Model, Callable[[], Stream | None]]:
    """Calibrate an int4 model on a text, print the result of the calibration, and return the same values as `_open`."""
    from clearhead.model.calibration import calibrate
    from clearhead.model.loading import load

    calibration = calibrate(load(ref, device="cpu"), text)
    for line in calibration.lines():
        print_message(line)
    return calibration.model, lambda: None


def _convert_bin(ref: str, out: Path, tokenizer: Path | None) -> str:
    """Convert pickled weights, and return the format of the new folder: safetensors or clearhead."""
    from clearhead.base.files import explain_absent
    from clearhead.checkpoints.hf.files.from_bin import convert_bin
    from clearhead.checkpoints.nanogpt import find_checkpoint
    from clearhead.checkpoints.reference import fetch, looks_like_hub_name
    from clearhead.checkpoints.runs.checkpoint import write_folder

    folder = Path(ref)
    checkpoint = find_checkpoint(folder)
    if checkpoint is not None:
        _convert_nanogpt(checkpoint, out, tokenizer)
        return "clearhead"
    if tokenizer is not None:
        raise InputError("--tokenizer has an effect with nanoGPT's ckpt.pt only; leave it out")
    if not folder.is_dir():
        if folder.exists() or not looks_like_hub_name(ref):
            fault = f"{ref} is a file" if folder.exists() else f"{ref}: {explain_absent(folder, 'folder')}"
            raise InputError(f"{fault}; expected a folder that holds pytorch_model.bin, or nanoGPT's ckpt.pt")
        folder = fetch(ref, with_bin=True)
    with write_folder(out) as temporary:
        names = convert_bin(folder, temporary)
    print_message(f"read {', '.join(names)}")
    return "safetensors"


def _convert_nanogpt(path: Path, out: Path, tokenizer: Path | None) -> None:
    import tempfile

    from clearhead.checkpoints.hf.saving import LARGEST_SHARD
    from clearhead.checkpoints.nanogpt import TASK, read_checkpoint
    from clearhead.model.facade import Model
    from clearhead.model.saving import write_model

    with tempfile.TemporaryDirectory() as origin:
        module, checkpoint = read_checkpoint(path, tokenizer, Path(origin))
        model = Model(module, checkpoint.tokenizers.pair, TASK, checkpoint)
        write_model(model, out, out.name, "clearhead", LARGEST_SHARD)
    print_message(f"read {path.name}: {sum(weight.numel() for weight in module.parameters()):,} parameters")


def _parse_size(size: str) -> int:
    """Return the bytes of a size with a unit, such as 500MB."""
    number, unit = size[:-2].strip(), size[-2:].upper()
    try:
        num_bytes = int(float(number) * UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        num_bytes = 0
    if num_bytes < 1:
        raise InputError(
            f"--max-shard-size {size} is not a size; expected a number and KB, MB, GB or TB, such as 500MB"
        )
    return num_bytes
