"""Tests what operators can do on the page. Each action needs a confirmation and the right role, and
works with the keyboard alone.
"""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from tests.integration.page.conftest import PagedMesh, asked_of, log_in
from tests.support.browser.chromium import watched
from tests.support.streams import stream_completion
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def out_of_service(paged: PagedMesh) -> dict[str, str]:
    """The reasons why instances are out of service, by instance."""
    states = await paged.operator.groups()
    return {each.instance_id: each.reason for each in states.out_of_service}


async def put_back(paged: PagedMesh, instance_id: str) -> None:
    await paged.operator.uncordon(instance_id)
    await paged.operator.until_serving(2, 2)


def cordon_of(page: Page, instance_id: str) -> str:
    return f'[data-key="cordon:{instance_id}"]'


async def test_an_operator_cordons_after_a_confirmation_and_uncordons(
    paged: PagedMesh, browser: Browser
) -> None:
    instance_id = (await paged.decodes())[0]
    async with watched(browser, f"{paged.url}#groups") as seen:
        page, dialog = seen.page, seen.page.get_by_role("dialog")
        await log_in(page, paged.keys["operator"], "operator")
        await page.locator(cordon_of(page, instance_id)).click()
        await expect(dialog).to_contain_text("its requests go on at other instances")
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("status")).to_have_text("nothing was changed")
        assert await out_of_service(paged) == {}
        await page.locator(cordon_of(page, instance_id)).click()
        await dialog.get_by_label("Reason").fill("a <b>new</b> fan")
        await dialog.get_by_role("button", name="Cordon").click()
        await expect(page.get_by_role("status")).to_have_text(f"{instance_id} leaves")
        assert await out_of_service(paged) == {instance_id: "a <b>new</b> fan"}
        row = page.get_by_role("table", name="out of service").get_by_role("row")
        await expect(row.filter(has_text="a <b>new</b> fan")).to_have_count(1)
        await page.keyboard.press("3")
        told = page.get_by_role("row", name=re.compile(f"change {instance_id} CordonInstance by"))
        await expect(told).to_have_count(1)
        await page.keyboard.press("4")
        await page.locator(f'#groups [data-key="uncordon:{instance_id}"]').first.click()
        await dialog.get_by_role("button", name="Uncordon").click()
        await expect(page.get_by_role("status")).to_contain_text("may get a role again")
        await until(lambda: _is_empty(paged))
        await paged.operator.until_serving(2, 2)
        assert await seen.complaints() == []


async def _is_empty(paged: PagedMesh) -> bool:
    return await out_of_service(paged) == {}


async def test_a_viewer_is_told_why_not_and_the_master_refuses_it_too(
    paged: PagedMesh, browser: Browser
) -> None:
    instance_id = (await paged.decodes())[0]
    why = "CordonInstance needs the role operator; yours is viewer"
    async with watched(browser, f"{paged.url}#groups") as seen:
        await log_in(seen.page, paged.keys["viewer"], "viewer")
        button = seen.page.locator(cordon_of(seen.page, instance_id))
        await expect(button).to_have_attribute("aria-disabled", "true")
        await expect(button).to_have_attribute("aria-description", why)
        await button.click(force=True)
        await expect(seen.page.get_by_role("status")).to_have_text(why)
        await expect(seen.page.get_by_role("dialog")).to_be_hidden()
        assert await seen.complaints() == []
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        asked = await client.post(
            f"{paged.url}admin/CordonInstance",
            json={"instance_id": instance_id, "mode": "LEAVE_MODE_AT_ONCE"},
            headers={"authorization": f"Bearer {paged.keys['viewer']}"},
        )
    assert asked.status_code == 403
    assert "needs the role operator" in asked.json()["error"]["message"]
    assert await out_of_service(paged) == {}


async def test_a_wrong_key_and_a_missing_right_to_apply_are_said_in_words(
    paged: PagedMesh, browser: Browser
) -> None:
    async with watched(browser, f"{paged.url}#desired") as seen:
        await seen.page.get_by_label("Token").fill("pdm_0000_wrong")
        await seen.page.get_by_label("Token").press("Enter")
        await expect(seen.page.get_by_role("alert")).to_have_text("this API key is not valid")
        await log_in(seen.page, paged.keys["operator"], "operator")
        await expect(seen.page.get_by_role("alert")).to_be_hidden()
        apply = seen.page.get_by_role("button", name="Apply…")
        await expect(apply).to_have_attribute(
            "aria-description", "ApplyDesired needs the role admin; yours is operator"
        )
        await log_in(seen.page, paged.keys["admin"], "admin")
        await expect(apply).not_to_have_attribute("aria-disabled", "true")


@pytest.mark.req("S21")
async def test_an_admin_sees_what_a_new_state_changes_before_it_is_applied(
    paged: PagedMesh, browser: Browser
) -> None:
    async with watched(browser, f"{paged.url}#desired") as seen:
        page, dialog = seen.page, seen.page.get_by_role("dialog")
        await log_in(page, paged.keys["admin"], "admin")
        text = page.get_by_label("the desired state, in YAML")
        await expect(text).to_have_value(re.compile("prefill: 2, decode: 2"))
        before = await text.input_value()
        await text.fill(before.replace("decode: 2", "decoder: 2"))
        await page.get_by_role("button", name="Apply…").click()
        await expect(page.get_by_role("status")).to_contain_text("groups.chat.decoder: is unknown")
        await text.fill(before.replace("decode: 2", "decode: 3"))
        await page.get_by_role("button", name="Apply…").click()
        await expect(dialog).to_contain_text("~ groups.chat.decode: 2 → 3")
        await dialog.get_by_label("Reason").fill("longer answers")
        await dialog.get_by_role("button", name="Apply").click()
        await expect(page.get_by_role("status")).to_contain_text("is the desired state")
        await paged.operator.until_serving(2, 3)
        await page.get_by_role("button", name="Roll back…").click()
        await dialog.get_by_role("button", name="Roll back").click()
        await expect(page.get_by_role("status")).to_contain_text("has the content of version 1")
        await paged.operator.until_serving(2, 2)
        versions = page.get_by_role("table", name="versions").get_by_role("row")
        await expect(versions.filter(has_text="longer answers")).to_have_count(1)


async def test_the_keyboard_alone_opens_an_instance_and_cordons_it(
    paged: PagedMesh, browser: Browser
) -> None:
    async with watched(browser, paged.url) as seen:
        page = seen.page
        await expect(page.locator("g.node")).not_to_have_count(0)
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog")).to_contain_text("find a request by its id")
        await page.keyboard.press("Escape")
        instance_id = await _tab_to(page, lambda key: key.startswith("node:"))
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_contain_text(instance_id)
        await _tab_to(page, lambda key: key.startswith("cordon:"))
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog").get_by_label("Reason")).to_be_focused()
        await page.keyboard.type("by keyboard")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("status")).to_have_text(f"{instance_id} leaves")
        assert await out_of_service(paged) == {instance_id: "by keyboard"}
        await expect(page.get_by_role("dialog")).to_be_hidden()
        assert await seen.complaints() == []
    await put_back(paged, instance_id)


async def _tab_to(page: Page, is_it: object) -> str:
    """Press Tab until the element with the focus has a key that `is_it` accepts. Return the
    instance id in that key.
    """
    for _ in range(60):
        await page.keyboard.press("Tab")
        key: str = await page.evaluate("document.activeElement?.dataset?.key ?? ''")
        if is_it(key):  # type: ignore[operator]  # a function
            return key.partition(":")[2]
    raise AssertionError("it is not in the order of the focus")


@pytest.mark.fault("F7")
async def test_a_killed_decode_is_shown_with_what_was_done_about_it(
    paged: PagedMesh, browser: Browser
) -> None:
    """The page is open when the decode dies. Requests run on the decode and continue on another
    one.
    """

    async def busy() -> list[str]:
        looks = (await asked_of(paged, "GetOverview"))["instances"]
        return [
            i["instance_id"] for i in looks if i["role"] == "ROLE_DECODE" and i["num_slots_used"]
        ]

    async with watched(browser, paged.url) as seen, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        page, url = seen.page, paged.mesh.http_url
        group = page.get_by_role("region", name="group chat")
        await expect(group.get_by_role("button", name=re.compile("decode, ready"))).to_have_count(2)
        streams = [
            asyncio.create_task(stream_completion(client, url, [60 + n] * 70, 400, ignore_eos=True))
            for n in range(6)
        ]
        await until(busy)
        victim = (await busy())[0]
        paged.mesh.kill(victim)
        await page.keyboard.press("3")
        incident = page.get_by_role("article").filter(has_text=f"{victim}: dead")
        await expect(incident).to_contain_text("judged dead")
        await expect(incident).to_contain_text("group chat: lost")
        await expect(incident).to_contain_text("takes its place as decode in chat")
        await expect(incident).to_contain_text("serves in its place")
        await expect(incident).to_contain_text("● over")
        await expect(incident).to_contain_text(re.compile(r"[1-6] requests went on elsewhere"))
        outcomes = await asyncio.gather(*streams)
        assert [o for o in outcomes if not o.is_complete] == []
        await paged.operator.until_serving(2, 2)
        await page.keyboard.press("1")
        await expect(group.get_by_role("button", name=re.compile("decode, ready"))).to_have_count(2)
        await expect(page.get_by_text("No open incident")).to_be_visible()
        assert await seen.complaints() == []
