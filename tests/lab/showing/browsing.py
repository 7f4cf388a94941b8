"""A real browser for tests: Chromium, driven by Playwright; `make browser` fetches what a machine lacks."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
AXE = Path(sys.prefix) / "axe" / "node_modules" / "axe-core" / "axe.min.js"
MISSING = (
    "no Chromium on this machine: apt-get install chromium"
    if CHROMIUM is None
    else "no Playwright: make browser"
    if importlib.util.find_spec("playwright") is None
    else None
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser that knows no host but this machine."""
    from playwright.sync_api import sync_playwright

    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page that keeps what the browser complains about and asks for."""

    def __init__(self, browser: Any, address: str, width: int = 1400, height: int = 900, **more: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height}, **more)
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()
