"""Saving of models into folders with spec, weights, tokenizers and model card, and upload to the hub."""

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
from clearhead.base.mapped_files import refuse_altered_weights
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
"""Files of a saved model that people may edit: its manifest does not list them."""
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
    """A validation result of a model, and the command that computed it."""

    name: str
    value: float
    command: str


class TrainingFacts(BaseModel):
    """Facts about the training of a model, for its card.

    Args:
        step: a phrase for the step of the weights, such as "step 1,000" or "the mean of steps 1, 2".
        recipe: the run file with all defaults filled in, as TOML, without paths of the machine.
        measured: the validation results of exactly these weights.
    """

    step: str
    recipe: str
    measured: list[ReportedMeasure]


def find_training_facts(weights: Path | None) -> TrainingFacts | None:
    """Return the facts about the training of weights, from their run or saved model; None if there are no facts.

    Args:
        weights: the file that the weights were loaded from. None means that they were made in memory.
    """
    if weights is None:
        return None
    try:
        if (weights.parent / FACTS_FILE).is_file():
            facts = read_typed(weights.parent / FACTS_FILE, TrainingFacts, what="the facts about a model")
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
    ):  # a missing fact in a card must not prevent saving
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
    """Return a line of a run file in which only the last name of each absolute path remains."""
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
        folder: the folder with all other files of the model.
        name: the repository or folder from which the code in the card loads the model.
        module, task, hf_checkpoint: same as in `Model`.
        facts: the facts about the training. None means that they are not known.
        is_clearhead_format: True if the folder has clearhead's layout, False for that of the hub.
    """
    from huggingface_hub import ModelCard, ModelCardData

    from clearhead.interpret.view.architecture import draw_architecture  # loading needs no drawing library

    # The user chooses the name, and Markdown would interpret it.
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
    """Return the sections of the card about data, recipe and metrics."""
    if facts is None:
        unknown = "Not known: the model was saved without its run."
        return {"data": unknown, "recipe": unknown, "metrics": unknown}
    data, rows = tomllib.loads(facts.recipe)["data"], facts.measured
    tables = [
        f"{split}: {json.dumps(data[split], ensure_ascii=False)}" for split in ("train", "valid") if split in data
    ]
    table = [f"| {_escape(row.name)} | {row.value:.4g} | {_format_code(row.command)} |" for row in rows]
    if is_int8 and table:
        table.append("\nThese results were measured before the weights were rounded to fewer bits.")
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
    """Return the hub repository of the checkpoint that the model came from; None if there is none."""
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
    """Return the library that reads the files, and Markdown text with the code that loads the model."""
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
    """Return a text escaped for one line of Markdown: HTML, links and table cells in it have no effect."""
    return re.sub(r"([^\w\s,'()%/])", r"\\\1", " ".join(text.split()))


def _format_code(text: str) -> str:
    """Return a text as Markdown code for a line or a table cell."""
    return f"`{' '.join(re.sub('[`|]', ' ', text).split())}`"


def _fence(text: str, language: str = "") -> str:
    """Return a Markdown code block that shows a text unchanged."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


class Saving:
    """Methods of `Model` that write it into a folder or upload it.

    Attributes:
        module, tokenizers, task, hf_checkpoint, weights_file: same as in `Model`.
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
            path: the new folder.
            format: "clearhead" for spec, tokenizers and weights, or "hf" for the layout of the Hugging Face hub.
            max_shard_size: the maximum size of the tensors in a file of that layout, in bytes.

        Raises:
            InputError: the folder exists, the format is not known, or no Hugging Face family can express the model.
        """
        write_model(self, Path(path), Path(path).name, format, max_shard_size)

    @check_types
    def push_to_hub(
        self, repo_id: str, *, format: str = "hf", private: bool = False, max_shard_size: int = LARGEST_SHARD
    ) -> str:
        """Upload the model with its card to the Hugging Face hub, from where `load` and transformers load it.

        The token is that of huggingface_hub: HF_TOKEN, or the token that `hf auth login` stored.

        Args:
            repo_id: the repository, OWNER/NAME. A missing repository is created; an existing one gets a new commit.
            format, max_shard_size: same as in `save`.
            private: True if only the owner may see a new repository.

        Returns:
            The address of the commit.

        Raises:
            InputError: the name is not valid, there is no token, the hub refuses the upload or cannot be reached; or
                same cases as in `save`.
        """
        return push_model(self, repo_id, format, max_shard_size, private=private)


def push_model(
    model: Saving, name: str, format: str, max_shard_size: int, weights: Stream | None = None, *, private: bool = False
) -> str:
    """Upload a model with its card to the Hugging Face hub.

    Args:
        model, weights: same as in `write_model`.
        name: the repository, OWNER/NAME.
        format, max_shard_size, private: same as in `Saving.push_to_hub`.

    Returns:
        The address of the commit.

    Raises:
        InputError: same cases as in `Saving.push_to_hub`.
    """
    refuse_bad_repository(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_model(model, folder, name, format, max_shard_size, weights)
        return upload(folder, name, private=private)


def write_model(
    model: Saving, folder: Path, name: str, format: str, max_shard_size: int, weights: Stream | None = None
) -> None:
    """Write a model with its card into a new folder.

    Args:
        model: the model.
        folder: the new folder.
        name: the reference by which the example in the card loads the model.
        format, max_shard_size: same as in `Saving.save`.
        weights: a stream of weights by address; the module may then be on the meta device. None means the weights of
            the module.

    Raises:
        InputError: same cases as in `Saving.save`, or a mapped file with the weights was changed meanwhile.
    """
    if format not in ("clearhead", "hf"):
        raise InputError(f"format '{format}' is not known; expected 'clearhead' or 'hf'")
    if max_shard_size < 1:
        raise InputError(argument("max_shard_size") + f" must be at least 1 byte, got {max_shard_size}")
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
        refuse_altered_weights(model.module)


def _write_clearhead_format(model: Saving, folder: Path, weights: Stream | None) -> None:
    (folder / FORMAT_FILE).write_text(SAVED_FORMAT.to_json(), encoding="utf-8")
    (folder / SPEC_FILE).write_text(model.module.spec.to_json(), encoding="utf-8")
    (folder / TASK_FILE).write_text(model.task.to_json(), encoding="utf-8")
    model.tokenizers.save(folder)
    save_tensors(folder / WEIGHTS_FILE, state_to_save(model.module), weights)
    if model.hf_checkpoint is not None:
        model.hf_checkpoint.save_origin(folder)


def refuse_bad_repository(name: str) -> None:
    """Refuse an invalid name of a repository, or any upload in offline mode, before a model is written.

    Raises:
        InputError: the name is not OWNER/NAME, or HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants

    if "@" in name or name.count("/") != 1 or not looks_like_hub_name(name):
        raise InputError(f"'{name}' is not a repository of the Hugging Face hub; expected OWNER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{name}: the Hugging Face hub is switched off by HF_HUB_OFFLINE: unset that")


def upload(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload the files of a folder as one commit.

    Args:
        folder: the folder with the files.
        name: the repository, OWNER/NAME, created if it is missing.
        private: True if only the owner may see a new repository.

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
                f"{name}: the Hugging Face hub refuses the upload: set HF_TOKEN to a token that may write there"
            ) from None
        raise InputError(f"{name}: the Hugging Face hub answers with the error {status}; try later") from None
    except (errors.HFValidationError, errors.LocalTokenNotFoundError, ValueError) as error:
        raise InputError(f"{name}: {_without_token(str(error).splitlines()[0])}") from None
    except OSError as error:
        reason = _without_token(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise InputError(f"{name}: the Hugging Face hub cannot be reached: {reason}") from None
    except Exception as error:  # noqa: BLE001 the client may raise anything on a foreign answer
        raise InputError(f"{name}: the Hugging Face hub {_without_token(describe_strange_answer(error))}") from None


def _without_token(text: str) -> str:
    """Return a message of a library with the token replaced by ***."""
    import huggingface_hub

    token = huggingface_hub.get_token()
    return text.replace(token, "***") if token else text
