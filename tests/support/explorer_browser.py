"""Helpers of the tests of the explorer's page: the browser, and what is seen in it."""

import os
import re
import shutil

from playwright.sync_api import Locator, Page, expect

expect.set_options(timeout=20_000)  # a busy machine is not a failure
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def browser_path() -> str:
    path = os.environ.get("RELPOS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "these tests need Chromium: on Debian, apt-get install chromium; elsewhere, set RELPOS_CHROMIUM."
    return path


def read(page: Page, what: str, place: int = 0) -> float:
    """A number under the cursor, once it is known."""
    cell = page.locator(f"[data-read={what}]").nth(place)
    expect(cell).not_to_have_text(re.compile("…|–"))
    return float(cell.get_attribute("data-exact") or cell.inner_text().replace("−", "-"))


def maps(page: Page) -> Locator:
    return page.get_by_role("application")


def rest(page: Page) -> None:
    """Wait until the maps are drawn, and nothing is on its way."""
    expect(page.locator("[role=application]:not([data-resolution])")).to_have_count(0)
    expect(maps(page).first).to_be_visible()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    page.wait_for_timeout(100)
    page.wait_for_load_state("networkidle")


def at(page: Page, x: float, y: float, place: int = 0) -> None:
    """Point at a place in a map, given as shares of its sides."""
    box = maps(page).nth(place).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])


def visit(page: Page, address: str) -> None:
    """Go to an address, and wait until it is drawn."""
    page.goto(address)
    rest(page)
