"""Chromium with a page that records errors, warnings, policy violations, and requests to other
origins.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

from tests.support.waiting import PATIENCE_S

FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Records violations of the page's content security policy, from the page's first line on.
_COUNT_VIOLATIONS: Final = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) =>
    window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


def program() -> str:
    """The path of Chromium. Skips the test if Chromium is not installed; .ci/nightly then fails."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed: apt install chromium, or run .ci/chromium")
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program(), args=list(FLAGS))
        yield browser
        await browser.close()


@dataclass
class Watched:
    """A page, the errors and warnings in its console, and its requests to other origins."""

    page: Page
    origin: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    async def complaints(self) -> list[str]:
        violations: list[str] = await self.page.evaluate("window.violations")
        return [*self.errors, *self.foreign, *violations]

    def on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.type}: {message.text}")

    def on_request(self, request: Request) -> None:
        if "{0.scheme}://{0.netloc}".format(urlsplit(request.url)) != self.origin:
            self.foreign.append(request.url)


@asynccontextmanager
async def watched(browser: Browser, url: str, **options: Any) -> AsyncIterator[Watched]:
    """Open a page and record its faults. `options` are arguments of Playwright's `new_context`."""
    context = await browser.new_context(**options)
    context.set_default_timeout(1000 * PATIENCE_S)
    await context.add_init_script(_COUNT_VIOLATIONS)
    page = await context.new_page()
    seen = Watched(page, "{0.scheme}://{0.netloc}".format(urlsplit(url)))
    page.on("console", seen.on_console)
    page.on("pageerror", lambda error: seen.errors.append(f"pageerror: {error}"))
    page.on("request", seen.on_request)
    await page.goto(url)
    yield seen
    await context.close()
