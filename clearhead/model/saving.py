"""Saved models: folders with spec, weights, tokenizers and model card, and their upload to the hub."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from pydantic import BaseModel

from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, argument
from clearhead.base.files import read_json_object, read_model_text, read_typed
from clearhead.base.formats import FORMAT_FILE
from clearhead.base.printing import num_parameters
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint
from clearhead.checkpoints.hf.saving import LARGEST_SHARD, save_checkpoint
from clearhead.checkpoints.reference import (
    CONFIG,
    SPEC_FILE,
    describe_strange_answer,
    looks_like_hub_name,
    repository_of,
)
from clearhead.checkpoints.runs.checkpoint import AVERAGED, write_folder
from clearhead.checkpoints.runs.directory import (
    RUN_FILE,
    SAVED_FORMAT,
    TASK_FILE,
    WEIGHTS_FILE,
    is_run_directory,
)
from clearhead.checkpoints.runs.extra_weights import read_average_record
from clearhead.checkpoints.runs.metrics import FILE_NAME, read_metrics
from clearhead.checkpoints.weights.files import Stream, save_tensors
from clearhead.core import Transformer
from clearhead.fast.stored import is_quantized, state_to_save
from clearhead.spec.describe import model_summary
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.text.pair import TokenizerPair

README: Final = "README.md"
DRAWING: Final = "architecture.svg"
CARD_FILES: Final = (README, DRAWING)
"""What people may change in a saved model: its manifest does not list them."""
FACTS_FILE: Final = "card.json"

_TEMPLATE: Final = """\
---
{{ card_data }}
---

# {{ title }}

{{ summary }}

![The architecture](architecture.svg)

## Intended use

`clearhead {{ use }}`: the task `{{ kind }}`, on text like its training data. \
{% if base %}It started from `{{ base }}`. {% endif %}Its quality on other text, and for other purposes, is not known.

## Data

{{ data }}

## Recipe

{{ recipe }}

## Metrics

{{ metrics }}

## Load it

{{ loading }}
"""


class ReportedMeasure(BaseModel):
    """A number of a model, and the command that made it."""

    name: str
    value: float
    command: str


class TrainingFacts(BaseModel):
    """What is known of how a model was trained.

    Args:
        step: optimizer steps taken, in words.
        recipe: the run file with every default filled in, as TOML, without the paths of the machine.
        measured: the validation of these weights.
    """

    step: str
    recipe: str
    measured: list[ReportedMeasure]


def find_training_facts(weights: Path | None) -> TrainingFacts | None:
    """Return what is known of the training of weights, by the run or the saved model that has them; None: nothing.

    Args:
        weights: the file that they were loaded from; None: they were made in memory.
    """
    if weights is None:
        return None
    try:
        if (weights.parent / FACTS_FILE).is_file():
            facts = read_typed(weights.parent / FACTS_FILE, TrainingFacts, what="what is known of a model")
            tables = tomllib.loads(facts.recipe)
            return facts if isinstance(tables["data"], dict) and isinstance(tables["task"], dict) else None
        run = next(folder for folder in weights.parents if folder.name == "checkpoints").parent
        return _read_run_facts(run, weights.parent.name) if is_run_directory(run) else None
    except (
        InputError,
        StopIteration,
        OSError,
        ValueError,
        LookupError,
        TypeError,
    ):  # a card is no reason to refuse to save a model
        return None


def _read_run_facts(run: Path, checkpoint: str) -> TrainingFacts:
    recipe = "\n".join(_hide_paths(line) for line in read_model_text(run / RUN_FILE, what="a run file").splitlines())
    command, score = f"clearhead train {RUN_FILE}", find_task(tomllib.loads(recipe)["task"]["kind"]).score
    if checkpoint == AVERAGED:
        about = read_average_record(run)
        steps = ", ".join(map(str, about.steps)) if about else "several steps"
        values, step = (about.valid_loss, about.valid_score) if about else (None, None), f"the mean of steps {steps}"
    else:
        number = int(checkpoint.removeprefix("step-"))
        rows = [row for row in read_metrics(run / FILE_NAME) if row.step == number and row.valid_loss is not None]
        values, step = (rows[-1].valid_loss, rows[-1].valid_score) if rows else (None, None), f"step {number:,}"
    names = "validation loss per label, in nats", f"validation {score}"
    measured = []
    for name, value in zip(names, values, strict=True):
        if value is not None:
            measured.append(ReportedMeasure(name=name, value=value, command=command))
    return TrainingFacts(step=step, recipe=recipe, measured=measured)


def _hide_paths(line: str) -> str:
    """Return a line of a run file with the last name alone in place of a path from the root of this machine."""
    return re.sub(
        r'"((?:/|[A-Za-z]:(?:/|\\\\))[^"]*)"', lambda match: f'"{PurePath(match[1].replace(chr(92), "/")).name}"', line
    )


def write_card(
    folder: Path,
    name: str,
    module: Transformer,
    task: TaskRecord,
    hf_checkpoint: HFCheckpoint | None,
    facts: TrainingFacts | None,
    *,
    is_clearhead_format: bool,
) -> None:
    """Write the card into the folder of a saved model.

    Args:
        folder: with all other files of the model.
        name: by which it will be loaded: of a repository, or of the folder.
        module, task, hf_checkpoint: of the model.
        known: of its training.
        is_own: whether the folder is in our own layout.
    """
    from huggingface_hub import ModelCard, ModelCardData

    from clearhead.interpret.view.architecture import draw_architecture  # pictures take a library that loading does not

    # Of a user's choice, and read as Markdown.
    name = re.sub(r"[^\w./@+-]", "_", name)
    data = {} if facts is None else tomllib.loads(facts.recipe)
    base, datasets = (
        _base_model(hf_checkpoint, data),
        [table["dataset"] for table in _tables(data) if "dataset" in table],
    )
    library, loading = _describe_loading(folder, name, is_clearhead_format=is_clearhead_format)
    card = ModelCard.from_template(
        ModelCardData(
            library_name=library,
            pipeline_tag=_pipeline_tag(task),
            tags=["clearhead", task.kind],
            base_model=base,
            datasets=sorted(filter(looks_like_hub_name, set(datasets))) or None,
        ),
        template_str=_TEMPLATE,
        title=PurePath(name).name,
        summary=_fence("\n".join([f"{num_parameters(module):,} parameters", *model_summary(module.spec)])),
        use=find_task(task.kind).used_with.format(run=name),
        kind=task.kind,
        base=base,
        loading=loading,
        **_describe_training(facts, is_int8=is_quantized(module)),
    )
    card.save(folder / README)
    (folder / DRAWING).write_text(draw_architecture(module.spec, PurePath(name).name), encoding="utf-8", newline="\n")
    if facts is not None and is_clearhead_format:
        (folder / FACTS_FILE).write_text(facts.model_dump_json(indent=2) + "\n", encoding="utf-8", newline="\n")


def _describe_training(facts: TrainingFacts | None, *, is_int8: bool) -> dict[str, str]:
    """Return what the card says of data, recipe and metrics."""
    if facts is None:
        unknown = "The model was saved without a run that knows it."
        return {"data": unknown, "recipe": unknown, "metrics": unknown}
    data, rows = tomllib.loads(facts.recipe)["data"], facts.measured
    tables = [
        f"{split}: {json.dumps(data[split], ensure_ascii=False)}" for split in ("train", "valid") if split in data
    ]
    table = [f"| {_escape(row.name)} | {row.value:.4g} | {_format_code(row.command)} |" for row in rows]
    if is_int8 and table:
        table.append("\nThese are of the weights before they were rounded to fewer bits.")
    return {
        "data": _fence("\n".join(tables)),
        "recipe": "`clearhead train run.toml`, with this `run.toml`; "
        f"{_escape(facts.step)}:\n\n{_fence(facts.recipe, 'toml')}",
        "metrics": "\n".join(["| measure | value | command |", "|---|---|---|", *table]) if table else "None was kept.",
    }


def _tables(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for table in data.get("data", {}).values():
        if isinstance(table, dict):
            yield table


def _base_model(hf_checkpoint: HFCheckpoint | None, data: Mapping[str, Any]) -> str | None:
    """Return the repository of the checkpoint that the model came from; None: it came from none, or from a folder."""
    init = str(data.get("task", {}).get("init", ""))
    if init and looks_like_hub_name(init) and not Path(init).exists():
        return init
    return None if hf_checkpoint is None else repository_of(hf_checkpoint.folder)


def _pipeline_tag(task: TaskRecord) -> str | None:
    try:
        return str(find_task(task.kind).module("pipeline").NAME)
    except (InputError, ModuleNotFoundError):
        return "text-generation" if find_task(task.kind).continues else None


def _describe_loading(folder: Path, name: str, *, is_clearhead_format: bool) -> tuple[str, str]:
    """Return the library that the files are for, and how the model is loaded, as Markdown."""
    here = _fence(f'import clearhead as ch\n\nmodel = ch.load("{name}")', "python")
    if is_clearhead_format:
        command = f"clearhead convert {name} OUT --to hf"
        return (
            "clearhead",
            f"{here}\n\n`{command}` writes it for transformers, where a model type there can express it.",
        )
    if (folder / "modules.json").is_file():
        lines, library = (
            f'from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer("{name}")',
            "sentence-transformers",
        )
    else:
        config = read_json_object(folder / CONFIG, what="a config.json")
        kind, library = (config.get("architectures") or ["AutoModel"])[0], "transformers"
        lines = (
            f"from transformers import AutoTokenizer, {kind}\n\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")\nmodel = {kind}.from_pretrained("{name}")'
        )
    return library, f"{here}\n\nThe same in {library}:\n\n{_fence(lines, 'python')}"


def _escape(text: str) -> str:
    """Escape a text for Markdown, in one line: HTML, links and table cells in it have no effect."""
    return re.sub(r"([^\w\s,'()%/])", r"\\\1", " ".join(text.split()))


def _format_code(text: str) -> str:
    """Return a text as Markdown code for a line or a table cell."""
    return f"`{' '.join(re.sub('[`|]', ' ', text).split())}`"


def _fence(text: str, language: str = "") -> str:
    """Return text that Markdown shows as it is."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


class Saving:
    """How a `Model` is written into a folder, and uploaded.

    Attributes:
        module, tokenizers, task, hf_checkpoint, weights_file: as in `Model`.
    """

    module: Transformer
    tokenizers: TokenizerPair
    task: TaskRecord
    hf_checkpoint: HFCheckpoint | None
    weights_file: Path | None

    @check_types
    def save(self, path: str | Path, *, format: str = "clearhead", max_shard_size: int = LARGEST_SHARD) -> None:
        """Write the model into a new folder that `load` reads, with a card: README.md and a drawing of its spec.

        Args:
            path: the folder.
            format: "clearhead": spec, tokenizers and weights; "hf": the layout of the Hugging Face hub.
            max_shard_size: bytes of tensors in a file of that layout.

        Raises:
            InputError: the folder exists, the format is not known, or no Hugging Face family can express the model.
        """
        write_model(self, Path(path), Path(path).name, format, max_shard_size)

    @check_types
    def push_to_hub(
        self, repo_id: str, *, format: str = "hf", private: bool = False, max_shard_size: int = LARGEST_SHARD
    ) -> str:
        """Upload the model with its card to the Hugging Face hub, from where `load` and transformers load it.

        The token is that of huggingface_hub: HF_TOKEN, or what `hf auth login` keeps.

        Args:
            repo_id: OWNER/NAME; made where it is missing, else it gets another commit.
            format, max_shard_size: as for `save`.
            private: whether a new repository can be seen by its owner alone.

        Returns:
            The address of the commit.

        Raises:
            InputError: the name cannot be one, there is no token, the hub refuses or cannot be reached; or as for
                `save`.
        """
        return push_model(self, repo_id, format, max_shard_size, private=private)


def push_model(
    model: Saving, name: str, format: str, max_shard_size: int, weights: Stream | None = None, *, private: bool = False
) -> str:
    """Upload a model with its card to the Hugging Face hub.

    Args:
        model, weights: as for `write_model`.
        name: of the repository, OWNER/NAME.
        format, max_shard_size, private: as for `Saving.push_to_hub`.

    Returns:
        The address of the commit.

    Raises:
        InputError: as for `Saving.push_to_hub`.
    """
    refuse_bad_repository(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_model(model, folder, name, format, max_shard_size, weights)
        return upload(folder, name, private=private)


def write_model(
    model: Saving, folder: Path, name: str, format: str, max_shard_size: int, weights: Stream | None = None
) -> None:
    """Write a model into a new folder; its card says how to load it by a name.

    Args:
        model: the model.
        folder: the new folder.
        name: by which the model will be loaded.
        format, max_shard_size: as for `Saving.save`.
        weights: the weights by address, one after the other; None means those of the module. With them, the module may
            be on the meta device.

    Raises:
        InputError: as for `Saving.save`.
    """
    if format not in ("clearhead", "hf"):
        raise InputError(f"format '{format}' is not known; expected 'clearhead' or 'hf'")
    if max_shard_size < 1:
        raise InputError(argument("max_shard_size") + f" is {max_shard_size}; expected a number of bytes")
    if folder.exists():
        raise InputError(f"{folder} exists already; give a new folder")
    with write_folder(folder, unlisted=CARD_FILES) as temporary:
        if format == "hf":
            origin = model.tokenizers, model.task, model.hf_checkpoint
            save_checkpoint(model.module, temporary, *origin, max_shard_size=max_shard_size, weights=weights)
        else:
            _write_clearhead_format(model, temporary, weights)
        facts, is_clearhead_format = find_training_facts(model.weights_file), format == "clearhead"
        write_card(
            temporary,
            name,
            model.module,
            model.task,
            model.hf_checkpoint,
            facts,
            is_clearhead_format=is_clearhead_format,
        )


def _write_clearhead_format(model: Saving, folder: Path, weights: Stream | None) -> None:
    (folder / FORMAT_FILE).write_text(SAVED_FORMAT.to_json(), encoding="utf-8")
    (folder / SPEC_FILE).write_text(model.module.spec.to_json(), encoding="utf-8")
    (folder / TASK_FILE).write_text(model.task.to_json(), encoding="utf-8")
    model.tokenizers.save(folder)
    save_tensors(folder / WEIGHTS_FILE, state_to_save(model.module), weights)
    if model.hf_checkpoint is not None:
        model.hf_checkpoint.save_origin(folder)


def refuse_bad_repository(name: str) -> None:
    """Refuse a name that no repository can have, or uploads where the hub is switched off, before a model is written.

    Raises:
        InputError: it is such a name, or HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants

    if "@" in name or name.count("/") != 1 or not looks_like_hub_name(name):
        raise InputError(f"'{name}' is no repository of the Hugging Face hub; expected OWNER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{name}: the Hugging Face hub is switched off by HF_HUB_OFFLINE: unset that")


def upload(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload the files of a folder as one commit.

    Args:
        folder: whose files are uploaded.
        name: of the repository, OWNER/NAME; made where it is missing.
        private: whether a new one is.

    Returns:
        The address of the commit.

    Raises:
        InputError: there is no token, or the hub refuses or cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.get_token() is None:
        raise InputError(f"{name}: the Hugging Face hub needs a token that may write: set HF_TOKEN")
    try:
        api = huggingface_hub.HfApi(library_name="clearhead")
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model of clearhead")
        return str(commit.commit_url)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise InputError(
                f"{name}: the Hugging Face hub refuses it: set HF_TOKEN to a token that may write there"
            ) from None
        raise InputError(f"{name}: the Hugging Face hub answers with the error {status}; try later") from None
    except (errors.HFValidationError, errors.LocalTokenNotFoundError, ValueError) as error:
        raise InputError(f"{name}: {_without_token(str(error).splitlines()[0])}") from None
    except OSError as error:
        reason = _without_token(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise InputError(f"{name}: the Hugging Face hub cannot be reached: {reason}") from None
    except Exception as error:  # noqa: BLE001 what the client raises depends on what a server answers
        raise InputError(f"{name}: the Hugging Face hub {_without_token(describe_strange_answer(error))}") from None


def _without_token(text: str) -> str:
    """Return the text of a library's message without the token, whatever it put there."""
    import huggingface_hub

    token = huggingface_hub.get_token()
    return text.replace(token, "***") if token else text
