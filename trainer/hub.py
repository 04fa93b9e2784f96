"""A teacher by its name: a folder here, or an id on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from teachercache.errors import UsageError


def model_folder(name: str) -> Path:
    """The folder itself, or the hub's snapshot of an id such as owner/model, downloaded once into the hub's own cache.

    Raises UsageError where it is neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        return folder  # who opens it says what is missing
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{name}: neither a folder here nor a model that the hub gives ({reason})") from error
