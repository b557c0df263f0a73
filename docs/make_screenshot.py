"""Takes the picture of the page that README shows.

    fedentopt compare --out out/demo
    python docs/make_screenshot.py out/demo

writes docs/pictures/page.png from out/demo/report.html, in headless Chromium.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(folder: Path, picture: Path) -> None:
    """The top of the page, and the chart of two cohorts below it."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 1190})
        page.goto((folder / "report.html").resolve().as_uri())
        page.wait_for_selector("html[data-ready=true]")
        page.wait_for_timeout(500)  # charts draw themselves
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).parent / "pictures" / "page.png")
