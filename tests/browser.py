"""A headless Chromium for the tests of pages and for scripts/screenshots.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
MISSING = "no Chromium on this machine (apt-get install chromium)"


@contextmanager
def browser() -> Iterator[Any]:
    """Give playwright's browser over the machine's own Chromium; only this machine has an address."""
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags, env={**os.environ, "HOME": "/tmp"})
        try:
            yield chromium
        finally:
            chromium.close()
