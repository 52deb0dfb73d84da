"""Checkpoints from the Hugging Face hub: downloaded once into its cache, and found there offline."""

from __future__ import annotations

import os
import re
from pathlib import Path

from clearhead.base.commands import make_command, quote
from clearhead.base.errors import InputError, shortened
from clearhead.base.files import absent, names_in, runs_nearby
from clearhead.checkpoints.hf.files.folder import check_links, is_checkpoint

LONGEST_NAME = 255
_OWN_SPEC = "spec.json"
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_FILES = (".json", ".toml", ".safetensors", ".bin")
_WANTED = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.safetensors")
# Folders with the same weights for other libraries.
_UNWANTED = ("onnx/*", "openvino/*", "original/*", "coreml/*", "flax/*", "tf/*")


def looks_like_hub_name(reference: str) -> bool:
    """Return whether a reference can be a repository: owner/name, or an old one without an owner; with or without @."""
    name = reference.partition("@")[0]
    return _NAME.fullmatch(name) is not None and ".." not in name and not name.endswith(_FILES)


def is_local(reference: str) -> bool:
    """Return True if a reference names files on this machine, with or without a label such as @best."""
    return Path(reference).exists() or Path(reference.rpartition("@")[0] or reference).exists()


def repository_of(folder: Path) -> str | None:
    """Return OWNER/NAME for a folder models--OWNER--NAME/snapshots/COMMIT in the hub's cache, or None."""
    prefix = "models--"
    names = [name.removeprefix(prefix).replace("--", "/") for name in folder.parts if name.startswith(prefix)]
    return names[-1] if names else None


def local(reference: str) -> str:
    """Return a reference with the folder of the files in place of a name on the hub, downloaded where needed.

    Args:
        reference: a run, a saved model or a folder; where there is none, a name on the hub.

    Raises:
        InputError: it is empty, the download fails, or no file can have such a name.
    """
    if not reference:
        raise InputError("the reference is empty: name a run directory, a checkpoint's folder or a model on the hub")
    path = Path(reference)
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        raise InputError(f"{reference[:60]}... has a name of more than {LONGEST_NAME} bytes, which no file can have")
    return str(fetch(reference)) if not is_local(reference) and looks_like_hub_name(reference) else reference


def find_checkpoint(reference: str) -> Path | None:
    """Return the folder of a Hugging Face checkpoint, downloaded where needed; None: the reference is something else.

    Args:
        reference: as for `local`.

    Raises:
        InputError: as for `local`, or the folder has links out of it.
    """
    folder = Path(local(reference))
    if not folder.is_dir() or not is_checkpoint(folder) or (folder / _OWN_SPEC).is_file():
        return None
    check_links(folder)
    return folder


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
    neither = (
        f"{reference}: {absent(Path(name), 'folder', [*runs_nearby(), *_cached_names()])}; and the Hugging Face hub"
    )
    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=wanted, ignore_patterns=list(_UNWANTED)
        )
    except errors.GatedRepoError:
        raise InputError(
            f"{reference}: the Hugging Face hub restricts access to it: accept its terms there and set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{neither} has no revision '{revision}' of {name}") from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{neither} has no repository of that name; a private one needs HF_TOKEN") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            status = error.__cause__.response.status_code
            raise InputError(f"{neither} answers with the error {status}, and its cache lacks it; try later") from None
        is_off = huggingface_hub.constants.HF_HUB_OFFLINE
        way = "is switched off by HF_HUB_OFFLINE" if is_off else "cannot be reached"
        raise InputError(
            f"{neither} {way}, and its cache lacks it: {'unset that' if is_off else 'connect'}, or name a run "
            "directory, a saved model or a checkpoint's folder"
        ) from None
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        raise InputError(f"{neither} cannot deliver it: {str(error).splitlines()[0]}") from None
    except Exception as error:  # noqa: BLE001 what the client raises depends on what a server answers
        raise InputError(f"{neither} {strange_answer(error)}") from None
    if not with_bin and not any(Path(found).glob("*.safetensors")):
        _refuse_bin(name, revision or None, reference)
    return Path(found)


def strange_answer(error: Exception) -> str:
    """Return the end of a message about an error that the hub's client raises on a foreign answer."""
    reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 200)
    return f"answers as no hub does ({reason}): check HF_ENDPOINT and the network's proxies"


def _cached_names() -> list[str]:
    """Return the names of the repositories in the hub's cache."""
    from huggingface_hub import constants

    folders = [name.split("--") for name in names_in(Path(constants.HF_HUB_CACHE))]
    return ["/".join(parts[1:]) for parts in folders if parts[0] == "models" and len(parts) in (2, 3)]


def _refuse_bin(name: str, revision: str | None, reference: str) -> None:
    """Refuse a repository that has pickled weights only, which were not downloaded."""
    import huggingface_hub

    try:
        files = huggingface_hub.list_repo_files(name, revision=revision)
    except Exception:  # noqa: BLE001 as above; the files are there without this question
        return
    if any(file.endswith(".bin") for file in files):
        raise InputError(
            f"{reference} has its weights as .bin only, a pickle format that is not loaded; "
            f"write them as safetensors with: {make_command(f'convert {quote(reference)} OUT --from-bin')}"
        )
