"""Put the chat templates that llama-cpp-python's source distribution carries into build/templates, for the tests.

    python scripts/fetch_templates.py          77 MB from PyPI; about seventy templates of llama.cpp's own tests

tests/pipeline/corpus/test_stock_templates.py takes them along where they are there. Nothing is installed.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

TARGET = Path(__file__).resolve().parent.parent / "build" / "templates"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        package = "llama-cpp-python"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            package,
            "-d",
            name,
            package,
        ]
        if subprocess.run(command).returncode:
            raise SystemExit("the source distribution cannot be had here; the tests go on without its templates")
        TARGET.mkdir(parents=True, exist_ok=True)
        (archive,) = Path(name).glob("*.tar.gz")
        count = 0
        with tarfile.open(archive) as packed:
            for member in packed:
                path = PurePosixPath(member.name)
                source = packed.extractfile(member) if path.parts[-3:-1] == ("models", "templates") else None
                if source is not None and path.suffix == ".jinja":
                    (TARGET / path.name).write_bytes(source.read())
                    count += 1
    print(f"{count} templates in {TARGET}")


if __name__ == "__main__":
    main()
