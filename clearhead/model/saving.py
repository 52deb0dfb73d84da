"""Saving of models into folders, and their upload to the Hugging Face hub; the token is never shown."""

from __future__ import annotations

import tempfile
from pathlib import Path

from clearhead.base.arguments import checked
from clearhead.base.errors import InputError, argument
from clearhead.base.formats import FORMAT_FILE
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint
from clearhead.checkpoints.hf.saving import LARGEST_SHARD, save_checkpoint
from clearhead.checkpoints.reference import SPEC_FILE, looks_like_hub_name, strange_answer
from clearhead.checkpoints.runs.checkpoint import writing_folder
from clearhead.checkpoints.runs.directory import SAVED_FORMAT, TASK_FILE, WEIGHTS_FILE
from clearhead.checkpoints.weights.files import save_tensors
from clearhead.core import Transformer
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair


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

    @checked
    def save(self, path: str | Path, *, format: str = "clearhead", max_shard_size: int = LARGEST_SHARD) -> None:
        """Write the model into a new folder that `load` reads, with a card: README.md and a drawing of its spec.

        Args:
            path: the folder.
            format: "clearhead": spec, tokenizers and weights; "hf": the layout of the Hugging Face hub.
            max_shard_size: bytes of tensors in a file of that layout.

        Raises:
            InputError: the folder exists, the format is not known, or no Hugging Face family can express the model.
        """
        self._save(Path(path), Path(path).name, format, max_shard_size)

    @checked
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
        refuse_no_repository(repo_id)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            self._save(folder, repo_id, format, max_shard_size)
            return upload(folder, repo_id, private=private)

    def _save(self, folder: Path, name: str, format: str, max_shard_size: int) -> None:
        """Write the model into a new folder; its card says how to load it by a name."""
        if format not in ("clearhead", "hf"):
            raise InputError(f"format '{format}' is not known; expected 'clearhead' or 'hf'")
        if max_shard_size < 1:
            raise InputError(argument("max_shard_size") + f" is {max_shard_size}; expected a number of bytes")
        if folder.exists():
            raise InputError(f"{folder} exists already; give a new folder")
        # Not at the top: pictures take a library that loading a model does not need.
        from clearhead.model.card import CARD_FILES, what_is_known, write_card

        parts = self.module, self.task, self.hf_checkpoint
        with writing_folder(folder, unlisted=CARD_FILES) as temporary:
            if format == "hf":
                self._write_hf(temporary, max_shard_size)
            else:
                self._write_own(temporary)
            write_card(temporary, name, *parts, what_is_known(self.weights_file), is_own=format == "clearhead")

    def _write_hf(self, folder: Path, max_shard_size: int) -> None:
        parts = self.tokenizers, self.task, self.hf_checkpoint
        save_checkpoint(self.module, folder, *parts, max_shard_size=max_shard_size)

    def _write_own(self, folder: Path) -> None:
        (folder / FORMAT_FILE).write_text(SAVED_FORMAT.to_json(), encoding="utf-8")
        (folder / SPEC_FILE).write_text(self.module.spec.to_json(), encoding="utf-8")
        (folder / TASK_FILE).write_text(self.task.to_json(), encoding="utf-8")
        self.tokenizers.save(folder)
        save_tensors(folder / WEIGHTS_FILE, self.module.state_dict())
        if self.hf_checkpoint is not None:
            self.hf_checkpoint.save_origin(folder)


def refuse_no_repository(name: str) -> None:
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
        raise InputError(f"{name}: the Hugging Face hub {_without_token(strange_answer(error))}") from None


def _without_token(text: str) -> str:
    """Return the text of a library's message without the token, whatever it put there."""
    import huggingface_hub

    token = huggingface_hub.get_token()
    return text.replace(token, "***") if token else text
