"""A headless Chromium, found by its name on PATH, and pages whose console stays silent.

`make test-all` runs this folder where a Chromium is installed: `apt-get install chromium` on Debian.
"""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        with playwright.chromium.launch(executable_path=found, args=["--no-sandbox"]) as browser:
            yield browser
