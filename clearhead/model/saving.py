"""Models written into folders, and uploaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

from clearhead.base.arguments import checked
from clearhead.base.errors import InputError, argument
from clearhead.base.formats import FORMAT_FILE
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint
from clearhead.checkpoints.hf.export import save_checkpoint, save_origin
from clearhead.checkpoints.hf.files.upload import refuse_no_repository, upload
from clearhead.checkpoints.hf.saving import LARGEST_SHARD
from clearhead.checkpoints.runs.checkpoint import writing_folder
from clearhead.checkpoints.runs.directory import SAVED_FORMAT, SPEC_FILE, TASK_FILE, WEIGHTS_FILE
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
            save_origin(self.hf_checkpoint, folder)
