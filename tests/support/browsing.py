"""Pages in headless Chromium, opened from disk with the network off."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
EVIL = "<script>alert(1)</script>"
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]


def launch() -> Iterator[Browser]:
    """What a `browser` fixture yields; without one the tests are skipped, or fail where it is required."""
    reason = None
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        reason = "playwright is not installed"
    if reason is None and CHROMIUM is None:
        reason = "no chromium on this machine (Debian: apt-get install chromium)"
    if reason is not None:
        if os.environ.get("FEDENTOPT_REQUIRE_BROWSER"):
            pytest.fail(f"the page was not tested in a browser: {reason}")
        pytest.skip(f"the page was not tested in a browser: {reason}")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield launched
        launched.close()


class OpenedPage:
    """A page with everything it complained about."""

    def __init__(self, browser: Browser, file: Path, **options: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.context = browser.new_context(offline=True, **{"viewport": DESKTOP, **options})
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", self._dialog)
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready=true]", timeout=60_000)

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def cells(self, table: str, name: str) -> list[str]:
        """The cells of a column, top to bottom, of the table that the CSS selector `table` finds."""
        found = self.page.locator(table)
        heads = [text.strip() for text in found.locator("thead th").all_inner_texts()]
        (at,) = [i for i, head in enumerate(heads) if head.startswith(name)]
        return [row.locator("th, td").nth(at).inner_text() for row in found.locator("tbody tr").all()]
