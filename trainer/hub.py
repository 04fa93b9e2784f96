"""Models by their id on the Hugging Face Hub: `owner/model`, or `owner/model@revision`."""

from __future__ import annotations

import re
from pathlib import Path

from teachercache.errors import UsageError

_ID = re.compile(
    r"(?P<model>[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*)(@(?P<revision>[A-Za-z0-9][A-Za-z0-9_./-]*))?"
)
SETTINGS = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""In the order in which they are looked for: the second only where a model has none of the first."""


def is_hub_id(name: str) -> bool:
    """Return whether a name is one of a model on the Hub: no URL, and no folder that is here."""
    return "://" not in name and _ID.fullmatch(name) is not None and not Path(name).expanduser().exists()


def snapshot(name: str) -> Path:
    """Return the local folder of a model on the Hub, downloaded where it is not in the Hub's cache on this machine.

    Raises UsageError where there is none, where it is incomplete, or where the Hub cannot be asked.
    """
    import huggingface_hub
    from huggingface_hub import constants

    match = _ID.fullmatch(name)
    assert match is not None
    model, revision = match["model"], match["revision"]
    fetch = f"hf download {model}" + (f" --revision {revision}" if revision else "")
    folder = Path()
    for weights in WEIGHTS:
        try:
            folder = Path(
                huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=[*SETTINGS, weights])
            )
        except Exception as error:
            raise UsageError(_reason(name, fetch, error, constants.HF_HUB_CACHE)) from error
        if any(folder.glob(weights)):
            break
    missing = [what for what in ("config.json", "tokenizer.json") if not (folder / what).is_file()]
    missing += [] if any(any(folder.glob(pattern)) for pattern in WEIGHTS) else [f"weights ({WEIGHTS[0]})"]
    if missing:
        raise UsageError(
            f"{name}: its snapshot {folder} holds no {' and no '.join(missing)}; complete it where there is a network ({fetch}), "
            "or give a folder"
        )
    return folder


def _reason(name: str, fetch: str, error: Exception, cache: str) -> str:
    kind, said = type(error).__name__, (str(error).strip().splitlines() or [type(error).__name__])[0]
    if kind == "GatedRepoError":
        return f"{name} is gated: accept its licence on the Hub and set HF_TOKEN"
    if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"):
        return f"{name}: neither a folder here nor a model on the Hugging Face Hub ({kind})"
    if said.startswith("Invalid filename"):  # in the Hub's listing
        return f"{name}: {said}"
    return (
        f"{name}: no folder here, not in the Hub's cache of this machine ({cache}), and the Hub did not give it ({kind}: "
        f"{said[:160]}); without a network, fetch it on another machine ({fetch}) and copy that folder, or give a folder"
    )
