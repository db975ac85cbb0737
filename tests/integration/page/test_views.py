"""Tests in a real browser what the operators' page shows, and that it loads nothing from other
sites.
"""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from pdmesh.core.history.scenario_history import STEP_S
from pdmesh.events.v1.events_pb2 import ErrorReported, RequestFinished
from pdmesh.net import subjects
from pdmesh.net.events import EventPublisher
from tests.integration.page.conftest import PagedMesh, asked_of
from tests.support.browser.chromium import watched
from tests.support.streams import stream_completion
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

VIEWS = ("mesh", "scenarios", "faults", "groups", "ratio", "request", "desired", "stores")
HOSTILE = '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\'"&'


async def answered(paged: PagedMesh, num: int = 4) -> list[str]:
    """Send `num` requests, one after another, and return the ids of their answers."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        ids = []
        for number in range(num):
            body = {"model": "default", "prompt": [41 + number] * 90, "max_tokens": 8}
            answer = await client.post(f"{paged.mesh.http_url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["id"])
    return ids


async def fits(page: Page) -> bool:
    """Whether nothing is wider than the window."""
    found: bool = await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return found


async def test_the_topology_shows_every_instance_and_the_flows_of_kv(
    paged: PagedMesh, browser: Browser
) -> None:
    await answered(paged)
    async with watched(browser, paged.url) as seen:
        group = seen.page.get_by_role("region", name="group chat")
        await expect(group.get_by_role("button")).to_have_count(4)
        states = await paged.operator.groups()
        for member in states.groups[0].members:
            await expect(group.get_by_role("button", name=f"{member.instance_id}, ")).to_have_count(
                1
            )
        assert await group.get_by_role("button", name=re.compile("decode, ready")).count() == 2
        await expect(group.locator("path.flow")).not_to_have_count(0)
        blank = seen.page.get_by_role("region", name="blank instances")
        await expect(blank.get_by_role("button")).to_have_count(2)
        assert await seen.complaints() == []


async def test_no_view_sends_a_request_elsewhere_violates_the_policy_or_logs_an_error(
    paged: PagedMesh, browser: Browser
) -> None:
    async with watched(browser, paged.url) as seen:
        for number, view in enumerate(VIEWS, 1):
            await seen.page.keyboard.press(str(number))
            await expect(seen.page.locator(f"#{view}")).to_be_visible()
            await expect(seen.page.locator("main > section:visible")).to_have_count(1)
        assert await seen.complaints() == []
        answer = await seen.page.request.get(paged.url)
        assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("width", [360, 420])
async def test_nothing_is_wider_than_a_narrow_screen(
    paged: PagedMesh, browser: Browser, width: int
) -> None:
    async with watched(browser, paged.url, viewport={"width": width, "height": 740}) as seen:
        await expect(seen.page.locator("g.node")).not_to_have_count(0)
        for view in VIEWS:
            await seen.page.goto(f"{paged.url}#{view}")
            await expect(seen.page.locator(f"#{view}")).to_be_visible()
            assert await fits(seen.page), view
        await seen.page.keyboard.press("4")
        await seen.page.get_by_role("button", name="Cordon").first.click()
        await expect(seen.page.get_by_role("dialog")).to_be_visible()
        assert await fits(seen.page)


async def test_it_is_dark_or_light_as_the_system_says_and_as_its_user_says(
    paged: PagedMesh, browser: Browser
) -> None:
    async def ground(page: Page) -> int:
        """The sum of the background's three colour values. 0 is black."""
        colour: str = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3])

    async with watched(browser, paged.url, color_scheme="dark") as seen:
        dark = await ground(seen.page)
        await seen.page.get_by_role("button", name="Dark or light").click()
        assert (dark < 150, await ground(seen.page) > 600) == (True, True)
        await seen.page.locator("body").press("t")
        assert await ground(seen.page) == dark
    async with watched(browser, paged.url, color_scheme="light") as seen:
        assert await ground(seen.page) > 600


async def test_ttft_and_goodput_are_charts_that_the_arrow_keys_read(
    paged: PagedMesh, browser: Browser
) -> None:
    """The charts divide time into steps, and show a step only when it is over."""
    num = 6
    await answered(paged, num)
    async with watched(browser, f"{paged.url}#scenarios") as seen:
        chart = seen.page.get_by_role("img", name=re.compile("^TTFT, the last hour"))
        await expect(chart).to_be_visible()
        await expect(seen.page.locator("#scenarios section")).to_contain_text("answered")
        await expect(chart.locator("polyline")).not_to_have_count(0)
        caption = seen.page.locator("figure", has=chart).locator("figcaption")
        before = await caption.inner_text()
        await chart.press("ArrowLeft")
        moved = await caption.inner_text()
        assert moved != before
        assert re.match(r"\d\d:\d\d:\d\d: half of the requests ", moved)
        history = await asked_of(paged, "GetHistory")
        while sum(history["scenarios"][0]["num_answered"]) < num:  # the last step is not over yet
            history = await asked_of(paged, "GetHistory")
        assert history["step_s"] == STEP_S
        (default,) = (each for each in history["scenarios"] if each["scenario"] == "default")
        assert sum(map(int, default["num_tokens"])) >= 8 * num
        assert max(default["ttft_p99_ms"]) >= max(default["ttft_p50_ms"]) > 0
        room = seen.page.get_by_role("row", name=re.compile("^default 0"))
        await expect(room).to_have_count(1)
        assert await seen.complaints() == []


async def test_a_requests_story_is_found_by_the_id_of_its_answer(
    paged: PagedMesh, browser: Browser
) -> None:
    (answer_id,) = await answered(paged, 1)
    async with watched(browser, paged.url) as seen:
        await seen.page.locator("body").press("/")
        await expect(seen.page.get_by_label("Request id")).to_be_focused()
        await seen.page.keyboard.type(answer_id)
        await seen.page.keyboard.press("Enter")
        steps = seen.page.get_by_role("table", name="steps").get_by_role("row")
        await expect(steps.filter(has_text="accepted: text_completion of")).to_have_count(1)
        await expect(steps.filter(has_text="first token")).to_have_count(1)
        await expect(steps.filter(has_text="completed: 8 tokens")).to_have_count(1)
        await seen.page.get_by_label("Request id").fill("chatcmpl-000000000000000000000000")
        await seen.page.keyboard.press("Enter")
        said = seen.page.get_by_role("status")
        await expect(said).to_contain_text("this master knows no request chatcmpl-0000")
        assert [
            e
            for e in await seen.complaints()
            if "400" not in e
            # The browser itself logs a line for the answer 400.
        ] == []


async def test_hostile_names_and_texts_are_shown_and_stay_inert(
    paged: PagedMesh, browser: Browser
) -> None:
    """Clients choose the names of scenarios, engines write errors and operators write reasons. None
    of these texts may become code on the page.
    """
    events = EventPublisher(paged.bus, f"gate{HOSTILE}", 1)
    finished = RequestFinished(
        request_id=HOSTILE, scenario=HOSTILE, outcome="completed", ttft_ms=5.0, e2e_ms=9.0,
        model=HOSTILE, reason=HOSTILE, prefill_id=HOSTILE, decode_id=f"d{HOSTILE}",
    )  # fmt: skip
    await events.publish(subjects.request_finished("gateway-0"), finished)
    error = ErrorReported(reason=HOSTILE, message=HOSTILE, request_id=HOSTILE)
    await events.publish(subjects.error_reported("decode-0"), error)
    async with watched(browser, f"{paged.url}#faults") as seen:
        await expect(seen.page.locator("#faults")).to_contain_text(HOSTILE)
        await seen.page.keyboard.press("1")
        await seen.page.get_by_text("KV flows of the last minute").click()
        await expect(seen.page.locator("#mesh")).to_contain_text(f"{HOSTILE} → d{HOSTILE}")
        await seen.page.keyboard.press("6")
        await seen.page.get_by_label("Request id").fill(HOSTILE)
        await seen.page.keyboard.press("Enter")
        await expect(seen.page.get_by_role("table", name="steps")).to_contain_text(HOSTILE)
        await seen.page.keyboard.press("Tab")
        await seen.page.locator("nav").get_by_text("Scenarios").click()
        chart = seen.page.locator(f"[data-key={_css(f'ttft:{HOSTILE}')}]")
        await expect(chart).to_have_count(1)
        assert await seen.page.evaluate("window.owned") is None
        assert await seen.page.locator("main img, main script").count() == 0
        assert await seen.complaints() == []


async def test_a_lost_connection_is_shown_and_recovered_from(
    paged: PagedMesh, browser: Browser
) -> None:
    async with watched(browser, paged.url) as seen:
        await expect(seen.page.locator("g.node")).not_to_have_count(0)
        problem = seen.page.get_by_role("alert")
        await expect(problem).to_be_hidden()
        await seen.page.context.set_offline(True)
        await expect(problem).to_contain_text("The master does not answer since")
        # the page keeps its earlier content
        await expect(seen.page.locator("g.node")).not_to_have_count(0)
        await seen.page.context.set_offline(False)
        await expect(problem).to_be_hidden()
        await expect(seen.page.get_by_role("status")).to_have_text("the master answers again")


async def test_a_drawing_that_changes_keeps_the_keyboards_place(
    paged: PagedMesh, browser: Browser
) -> None:
    async with watched(browser, paged.url) as seen, httpx.AsyncClient(timeout=60) as client:
        node = seen.page.locator("g.node").first
        await node.focus()
        key = await node.get_attribute("data-key")
        before = await node.element_handle()
        asking = [
            asyncio.create_task(stream_completion(client, paged.mesh.http_url, [50 + n] * 80, 60))
            for n in range(8)
        ]
        assert before is not None
        await seen.page.wait_for_function("(old) => !old.isConnected", arg=before)
        focused = await seen.page.evaluate("document.activeElement.dataset.key")
        assert focused == key
        await asyncio.gather(*asking)


def _css(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
