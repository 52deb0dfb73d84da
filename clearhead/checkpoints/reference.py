"""References to models: parsing of a text into a folder and a label, and download of names on the Hugging Face hub.

This module does not import torch, which takes seconds to load.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from clearhead.base.commands import make_command, quote
from clearhead.base.errors import InputError, shorten
from clearhead.base.files import explain_absent, file_inside, names_in, runs_nearby

CONFIG = "config.json"
READ = (".json", ".txt", ".model", ".spm", ".jinja", ".safetensors")
"""Suffixes of the files of a Hugging Face checkpoint that clearhead reads."""
SPEC_FILE = "spec.json"
ORIGIN = "origin"
"""Folder of a run or a saved model for the other files of the Hugging Face checkpoint that it came from."""
LONGEST_NAME = 255
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_FILES = (".json", ".toml", ".safetensors", ".bin")
_WANTED = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.safetensors")
# Folders with the same weights for other libraries.
_UNWANTED = ("onnx/*", "openvino/*", "original/*", "coreml/*", "flax/*", "tf/*")


@dataclass(frozen=True)
class ModelReference:
    """A reference to a trained model: the folder of its files, and a label that selects a checkpoint.

    Attributes:
        folder: the folder of a run, a saved model or a Hugging Face checkpoint.
        label: the label of a checkpoint of a run, such as "last" or "step-100". None means the default checkpoint.
    """

    folder: Path
    label: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelReference:
        """Parse `FOLDER` or `FOLDER@LABEL` without asking the hub; an existing folder may have "@" in its name."""
        name, sign, label = text.rpartition("@")
        if not (sign and name) or Path(text).exists():
            return cls(Path(text))
        return cls(Path(name), label)

    @classmethod
    def locate(cls, text: str) -> ModelReference:
        """Parse a user's reference; for a name on the hub, download the files and return their folder.

        Args:
            text: a folder, optionally with a label. If there is no such folder, a name on the hub, optionally with a
                revision.

        Raises:
            InputError: the text is empty, a name in it is too long, or the download fails.
        """
        if not text:
            raise InputError(
                "the reference is empty: name a run directory, a checkpoint's folder or a model on the hub"
            )
        if any(len(os.fsencode(name)) > LONGEST_NAME for name in Path(text).parts):
            raise InputError(f"{text[:60]}... has a name that is too long: expected at most {LONGEST_NAME} bytes")
        reference = cls.parse(text)
        if not reference.folder.exists() and looks_like_hub_name(text):
            return cls(fetch(text))
        return reference

    def checkpoint_folder(self) -> Path | None:
        """Return the folder if it holds a Hugging Face checkpoint, else None.

        Raises:
            InputError: a file of the checkpoint is a link out of the folder.
        """
        folder = self.folder
        # A broken link config.json counts as well: the message is then about the link.
        if self.label is not None or not os.path.lexists(folder / CONFIG) or (folder / SPEC_FILE).is_file():
            return None
        for path in sorted(folder.iterdir()):
            if path.is_symlink() and path.suffix in READ:
                file_inside(folder, path.name)
        return folder


def looks_like_hub_name(reference: str) -> bool:
    """Return whether a text can name a repository: owner/name or name, with or without @ and a revision."""
    name = reference.partition("@")[0]
    return _NAME.fullmatch(name) is not None and ".." not in name and not name.endswith(_FILES)


def repository_of(folder: Path) -> str | None:
    """Return OWNER/NAME for a folder models--OWNER--NAME/snapshots/COMMIT of the hub's cache, else None."""
    prefix = "models--"
    names = [name.removeprefix(prefix).replace("--", "/") for name in folder.parts if name.startswith(prefix)]
    return names[-1] if names else None


def fetch(reference: str, *, with_bin: bool = False) -> Path:
    """Return the folder of a repository's files, after downloading files that the cache lacks.

    The environment variables of huggingface_hub set the hub, the cache, the token and the offline mode: HF_ENDPOINT,
    HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

    Args:
        reference: the name of a repository, optionally with @ and a branch, a tag or a commit.
        with_bin: True to download pickled weights as well, for conversion.

    Raises:
        InputError: the repository or revision does not exist, access is denied, or the weights are only pickled. Also
            if the hub cannot be reached and the cache lacks the files.
    """
    import huggingface_hub
    from huggingface_hub import errors

    name, _, revision = reference.partition("@")
    wanted = [*_WANTED, "*.bin"] if with_bin else list(_WANTED)
    message_start = (
        f"{reference}: {explain_absent(Path(name), 'folder', [*runs_nearby(), *_list_cached_names()])}; "
        "and the Hugging Face hub"
    )
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=wanted, ignore_patterns=list(_UNWANTED)
        )
    except errors.GatedRepoError:
        raise InputError(
            f"{reference}: the Hugging Face hub restricts access to it: accept its terms there and set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{message_start} has no revision '{revision}' of {name}") from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{message_start} has no repository of that name; a private one needs HF_TOKEN") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            status = error.__cause__.response.status_code
            raise InputError(
                f"{message_start} answers with the error {status}, and no copy is cached; try later"
            ) from None
        is_off = huggingface_hub.constants.HF_HUB_OFFLINE
        obstacle = "is switched off by HF_HUB_OFFLINE" if is_off else "cannot be reached"
        raise InputError(
            f"{message_start} {obstacle}, and no copy is cached: {'unset that' if is_off else 'connect'}, or name a "
            "run directory, a saved model or a checkpoint's folder"
        ) from None
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        raise InputError(f"{message_start} cannot deliver it: {str(error).splitlines()[0]}") from None
    except Exception as error:  # noqa: BLE001 the client may raise anything on a foreign answer
        raise InputError(f"{message_start} {describe_strange_answer(error)}") from None
    if not with_bin and not any(Path(folder).glob("*.safetensors")):
        _refuse_bin(name, revision or None, reference)
    return Path(folder)


def describe_strange_answer(error: Exception) -> str:
    """Return the end of an error message about a server that does not answer like a Hugging Face hub."""
    reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 200)
    return f"sent an unexpected answer ({reason}): check HF_ENDPOINT and the network's proxies"


def _list_cached_names() -> list[str]:
    """Return the names of the repositories in the hub's cache."""
    from huggingface_hub import constants

    folders = [name.split("--") for name in names_in(Path(constants.HF_HUB_CACHE))]
    return ["/".join(parts[1:]) for parts in folders if parts[0] == "models" and len(parts) in (2, 3)]


def _refuse_bin(name: str, revision: str | None, reference: str) -> None:
    """Refuse a repository whose weights are only pickled; they were not downloaded."""
    import huggingface_hub

    try:
        files = huggingface_hub.list_repo_files(name, revision=revision)
    except Exception:  # noqa: BLE001 as above; the download succeeded without this list
        return
    if any(file.endswith(".bin") for file in files):
        raise InputError(
            f"{reference} has its weights as .bin only, a pickle format that is not loaded; "
            f"write them as safetensors with: {make_command(f'convert {quote(reference)} OUT --from-bin')}"
        )
