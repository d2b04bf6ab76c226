"""A page as a browser shows it: what it drew, what it complained about, what it asked the network for."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which could not be installed here")


@dataclass(frozen=True)
class Seen:
    figures: list[tuple[float, float]]  # width and height of every SVG
    complaints: list[str]
    requests: list[str]
    text: str
    text_colour: str  # of a figure's text
    hacked: bool  # whether a script that came with data has run


def open_page(path: Path, scheme: str = "light") -> Seen:
    """Open a file in headless Chromium with a light or dark colour scheme."""
    from playwright.sync_api import sync_playwright

    complaints, requests = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1240, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.absolute().as_uri())
        boxes = [svg.bounding_box() for svg in page.query_selector_all("svg")]
        seen = Seen(
            figures=[(box["width"], box["height"]) for box in boxes],
            complaints=complaints,
            requests=[url for url in requests if not url.startswith(("file:", "data:"))],
            text=page.inner_text("body"),
            text_colour=page.evaluate("getComputedStyle(document.querySelector('svg text')).fill"),
            hacked=page.evaluate("window.hacked === true"),
        )
        browser.close()
    return seen


def assert_sound(seen: Seen, figures: int) -> None:
    """Every figure has an area; nothing was complained about or fetched; no script of the data ran."""
    assert len(seen.figures) >= figures
    assert all(width > 100 and height > 30 for width, height in seen.figures)
    assert seen.complaints == []
    assert seen.requests == []
    assert not seen.hacked
