"""Checkpoints from the Hugging Face hub: fetched once into its cache, and found there without a network."""

from __future__ import annotations

import re
from pathlib import Path

from clearhead.errors import InputError
from clearhead.hf.files.tensor_files import check_links
from clearhead.hf.loading import is_checkpoint

_OWN_SPEC = "spec.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.safetensors")
# Folders with the same weights for other tools.
_UNWANTED = ("onnx/*", "openvino/*", "original/*", "coreml/*", "flax/*", "tf/*")


def looks_like_hub_name(reference: str) -> bool:
    """Return whether a reference can be the name of a repository, org/name, with or without @revision.

    The few old names without an owner are not taken, so that a mistyped folder is not looked for in the whole world.
    """
    return _NAME.fullmatch(reference.partition("@")[0]) is not None and ".." not in reference


def find_checkpoint(reference: str) -> Path | None:
    """Return the folder of a checkpoint in the layout of the hub, fetched where needed; None: it is no such reference.

    Args:
        reference: a folder, or a name on the hub.

    Raises:
        InputError: the name cannot be fetched, or the folder holds links that lead out of it.
    """
    folder = Path(reference)
    if folder.is_dir():
        if not is_checkpoint(folder) or (folder / _OWN_SPEC).is_file():
            return None
        check_links(folder)
        return folder
    if folder.exists() or Path(reference.rpartition("@")[0] or reference).exists():
        return None
    return fetch(reference) if looks_like_hub_name(reference) else None


def fetch(reference: str, *, with_bin: bool = False) -> Path:
    """Return the folder of a repository's files, fetched where they are not in the cache.

    Which hub, cache and token are used, and whether there is a network, follows from the variables that huggingface_hub
    reads: HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

    Args:
        reference: the name of a repository, and behind an @ a branch, a tag or a commit.
        with_bin: also fetch weights in pickled files, for a conversion that reads them.

    Raises:
        InputError: no such repository or revision, no right to read it, no network and nothing in the cache, or weights
            in pickled files only.
    """
    import huggingface_hub
    from huggingface_hub import errors

    name, _, revision = reference.partition("@")
    wanted = [*_WANTED, "*.bin"] if with_bin else list(_WANTED)
    place = f"{reference} is not a folder; expected a run directory, a saved model or a name on the hub, and the hub"
    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=wanted, ignore_patterns=list(_UNWANTED)
        )
    except errors.GatedRepoError:
        raise InputError(f"{place} gives it only to those it knows: accept its terms there and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{place} has no revision '{revision}' of it") from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{place} has none of that name, or not for you: set HF_TOKEN for a private one") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            status = error.__cause__.response.status_code
            raise InputError(
                f"{place} cannot give it: it answers with the error {status}, and the cache does not hold it; try later"
            ) from None
        raise InputError(
            f"{place} cannot be reached, and the cache does not hold it: connect, or name a folder"
        ) from None
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        raise InputError(f"{place} cannot give it: {str(error).splitlines()[0]}") from None
    if not with_bin and not any(Path(found).glob("*.safetensors")):
        _refuse_bin(name, revision or None, reference)
    return Path(found)


def _refuse_bin(name: str, revision: str | None, reference: str) -> None:
    """Say so where a repository has its weights as pickled files only; they were not fetched."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        files = huggingface_hub.list_repo_files(name, revision=revision)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError):
        return
    if any(file.endswith(".bin") for file in files):
        raise InputError(
            f"{reference} has its weights as .bin only, a format that can hold programs and is never read by itself; "
            f"write them as safetensors with: clearhead convert {reference} OUT --from-bin"
        )
