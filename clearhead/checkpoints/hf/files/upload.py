"""Folders uploaded to the Hugging Face hub; the token is never shown."""

from __future__ import annotations

from pathlib import Path

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.files.hub import looks_like_hub_name, strange_answer


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
