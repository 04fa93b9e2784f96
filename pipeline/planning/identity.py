"""From a job file to the cache's identity: the model's folder, its fingerprints, the spec."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.config import JobConfig, TeacherConfig
from teachercache import CacheSpec, TeacherSpec, fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.errors import UsageError

# engine arguments that change a log-probability on purpose; all others are provenance
_IDENTITY_ARGUMENTS = ("quantization", "kv_cache_dtype", "rope_scaling", "rope_theta", "hf_overrides", "load_format")


def resolve_model(config: TeacherConfig) -> Path:
    """Return the teacher's local folder; a hub id is fetched into the hub's cache first. Raises UsageError."""
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        for name in ("tokenizer.json",) if config.engine == "noop" else ("tokenizer.json", "config.json"):
            if not (folder / name).exists():
                raise UsageError(f"teacher.model {config.model}: expected a folder with {name}, found none in it")
        return folder.resolve()
    looks_like_path = config.model.startswith(("/", ".", "~")) or config.model.count("/") != 1
    if looks_like_path:
        raise UsageError(f"teacher.model {config.model}: no such folder; give a model's folder or an id on the hub")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(config.model, revision=config.revision))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"teacher.model {config.model}: neither a folder here nor a model on the Hugging Face hub ({reason})"
        ) from error


def build_spec(job: JobConfig, folder: Path) -> CacheSpec:
    """Return the cache's identity. Reads and hashes the teacher's files (weights once, about 1 GB/s)."""
    config = job.teacher
    tokenizer = fingerprint_tokenizer(folder)
    if job.rows.spec.entries > tokenizer.vocab_size:
        raise UsageError(
            f"rows.entries {job.rows.spec.entries} exceeds the tokenizer's {tokenizer.vocab_size} tokens; set rows.entries"
        )
    if config.engine == "noop":
        nothing = hashlib.sha256(b"noop").hexdigest()
        made_up: dict[str, Any] = {"engine": "noop", "dtype": "float32", "head_dtype": "float32"}
        teacher = TeacherSpec(name=config.name or "noop", weights_digest=nothing, config_digest=nothing, **made_up)
        return CacheSpec(teacher=teacher, tokenizer=tokenizer, rows=job.rows.spec)
    stored: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored_quantization = stored.get("quantization_config") or {}
    overrides = {k: v for k, v in config.engine_args.items() if k in _IDENTITY_ARGUMENTS[3:]}
    teacher = TeacherSpec(
        name=config.name or (Path(config.model).name if Path(config.model).expanduser().is_dir() else config.model),
        revision=config.revision or "",
        weights_digest=fingerprint_weights(folder),
        config_digest=fingerprint_config(folder),
        dtype=config.dtype,
        quantization=config.engine_args.get("quantization") or stored_quantization.get("quant_method"),
        kv_cache_dtype=str(config.engine_args.get("kv_cache_dtype", "auto")),
        engine=config.engine,
        head_dtype=config.head_dtype,
        rope_scaling=config.engine_args.get("rope_scaling") or stored.get("rope_scaling"),
        overrides=overrides,
    )
    return CacheSpec(teacher=teacher, tokenizer=tokenizer, rows=job.rows.spec)
