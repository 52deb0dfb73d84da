"""Checkpoints from the Hugging Face hub: downloaded once into its cache, and found there offline."""

from __future__ import annotations

import re
from pathlib import Path

from clearhead.errors import InputError, nearest
from clearhead.files import neighbours
from clearhead.hf.files.tensor_files import check_links, is_checkpoint

_OWN_SPEC = "spec.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.safetensors")
# Folders with the same weights for other libraries.
_UNWANTED = ("onnx/*", "openvino/*", "original/*", "coreml/*", "flax/*", "tf/*")


def looks_like_hub_name(reference: str) -> bool:
    """Return whether a reference can be the name of a repository, org/name, with or without @revision.

    The few old names without an owner are not accepted, so that a mistyped folder is not looked up on the hub.
    """
    return _NAME.fullmatch(reference.partition("@")[0]) is not None and ".." not in reference


def find_checkpoint(reference: str) -> Path | None:
    """Return the folder of a Hugging Face checkpoint, downloaded where needed; None: the reference is something else.

    Args:
        reference: a folder, or a name on the hub.

    Raises:
        InputError: the download fails, or the folder has links out of it.
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
    """Return the folder of a repository's files, downloaded where they are not in the cache.

    Hub, cache, token and offline mode are those of huggingface_hub's environment variables: HF_ENDPOINT, HF_HOME,
    HF_TOKEN and HF_HUB_OFFLINE.

    Args:
        reference: the name of a repository, optionally with @ and a branch, a tag or a commit.
        with_bin: also download pickled weights, for a conversion that reads them.

    Raises:
        InputError: no such repository or revision, no permission, no network and nothing in the cache, or pickled
            weights only.
    """
    import huggingface_hub
    from huggingface_hub import errors

    name, _, revision = reference.partition("@")
    wanted = [*_WANTED, "*.bin"] if with_bin else list(_WANTED)
    hint = nearest(Path(name).name, neighbours(Path(name)))
    place = (
        f"{reference} is not a folder{hint}; expected a run directory, a saved model or a name on the hub, but the hub"
    )
    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=wanted, ignore_patterns=list(_UNWANTED)
        )
    except errors.GatedRepoError:
        raise InputError(f"{place} restricts access to it: accept its terms there and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{place} has no revision '{revision}' of it") from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{place} has no repository of that name; set HF_TOKEN for a private one") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            status = error.__cause__.response.status_code
            raise InputError(
                f"{place} answers with the error {status}, and it is not in the cache; try later"
            ) from None
        raise InputError(f"{place} cannot be reached, and it is not in the cache: connect, or name a folder") from None
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        raise InputError(f"{place} cannot deliver it: {str(error).splitlines()[0]}") from None
    if not with_bin and not any(Path(found).glob("*.safetensors")):
        _refuse_bin(name, revision or None, reference)
    return Path(found)


def _refuse_bin(name: str, revision: str | None, reference: str) -> None:
    """Refuse a repository that has pickled weights only, which were not downloaded."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        files = huggingface_hub.list_repo_files(name, revision=revision)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError):
        return
    if any(file.endswith(".bin") for file in files):
        raise InputError(
            f"{reference} has its weights as .bin only, a pickle format that is not loaded; "
            f"write them as safetensors with: clearhead convert {reference} OUT --from-bin"
        )
