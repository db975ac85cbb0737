"""The operators' page offers AdminService as JSON over HTTP, with the same checks.

Pages of other sites are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from pdmesh.services.master_scheduler.admin import page_routes as page_files
from pdmesh.services.master_scheduler.admin.callers import AdminAccess
from pdmesh.services.master_scheduler.admin.page_routes import page_routes
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.support.sites.master_site import CHAT, Site

MODULES = sorted((Path(page_files.__file__).parent / "page" / "modules").glob("*.js"))
HERE, JSON = "http://127.0.0.1:9", {"content-type": "application/json"}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    site.add("p-0", ROLE_PREFILL, "chat")
    site.add("d-0", ROLE_DECODE, "chat")
    await site.apply(CHAT)
    await site.start()
    await site.loop.round()
    yield site
    await site.close()


def browser(
    site: Site,
    *,
    has_token: bool = False,
    only_host: str | None = None,
    client: str = "127.0.0.1",
    url: str = HERE,
) -> httpx.AsyncClient:
    routes = page_routes(site.admin, has_token=has_token, only_host=only_host)
    app = Starlette(routes=routes)
    transport = httpx.ASGITransport(app, client=(client, 4711))
    return httpx.AsyncClient(transport=transport, base_url=url)


async def ask(
    client: httpx.AsyncClient, method: str, headers: dict[str, str] | None = None, **request: Any
) -> tuple[int, Any]:
    answer = await client.post(
        f"/admin/{method}", content=json.dumps(request), headers=headers or JSON
    )
    return answer.status_code, answer.json()


@pytest.mark.req("S21")
async def test_the_page_shows_and_changes_the_same_as_the_admin_service(site: Site) -> None:
    async with browser(site) as client:
        status, states = await ask(client, "ListGroupStates")
        assert (status, [g["group_id"] for g in states["groups"]]) == (200, ["chat"])
        text = CHAT.replace("allow_single: true", "allow_single: true, ratio: auto")
        _, diff = await ask(client, "DiffDesired", text=text)
        assert diff["changes"][0]["path"] == "scenarios.default.ratio"
        _, applied = await ask(client, "ApplyDesired", text=text, expected_version="1")
        assert applied["version"] == "2"
        status, late = await ask(client, "ApplyDesired", text=CHAT, expected_version="1")
        assert (status, late["error"]["message"]) == (409, "version 2 is current, not 1")
        status, wrong = await ask(client, "ApplyDesired", text="groups:\n  chat: {prefil: 2}\n")
        assert (status, wrong["error"]["field"]) == (400, "groups.chat.prefil")
        assert wrong["error"]["message"].startswith("line 2: groups.chat.prefil: is unknown")
        _, back = await ask(client, "RollbackDesired")
        assert (back["version"], back["restored_version"]) == ("3", "1")


async def test_an_invalid_request_gets_a_readable_refusal(site: Site) -> None:
    async with browser(site) as client:
        assert (await ask(client, "Nothing"))[0] == 404
        status, answer = await ask(client, "DiffDesired", texts=1)
        assert (status, answer["error"]["reason"]) == (400, "INVALID_REQUEST")
        answer = await client.post("/admin/DiffDesired", content="{" * 5_000_000, headers=JSON)
        assert answer.status_code == 400
        status, answer = await ask(
            client, "CordonInstance", instance_id="x", mode="LEAVE_MODE_DRAIN"
        )
        assert (status, answer["error"]["message"]) == (400, "there is no x")


@pytest.mark.parametrize(
    ("headers", "client", "url", "says"),
    [
        ({}, "127.0.0.1", HERE, "the content type must be"),
        (JSON | {"origin": "http://evil.example"}, "127.0.0.1", HERE, "another site's page"),
        (JSON, "127.0.0.1", "http://evil.example:9", "must be localhost or a loopback one"),
        (JSON, "10.0.0.7", HERE, "only calls from this machine"),
    ],
)
async def test_no_foreign_page_and_no_other_machine_changes_anything_without_a_token(
    site: Site, headers: dict[str, str], client: str, url: str, says: str
) -> None:
    """In the operator's browser, the request may come from another site's page, or from a page
    whose name leads to this machine (DNS rebinding).
    """
    async with browser(site, client=client, url=url) as each:
        status, answer = await ask(
            each, "ListGroupStates", headers or {"content-type": "text/plain"}
        )
        assert status == 403
        assert says in answer["error"]["message"]


async def test_with_mutual_tls_calls_of_other_machines_are_refused_even_with_the_token(
    site: Site,
) -> None:
    """The page's port asks for no certificate, so anyone who reads the network would have the
    token.
    """
    token = "a-token-of-16-characters"
    site.admin._access = AdminAccess(token)
    headers = JSON | {"authorization": f"Bearer {token}"}
    statuses = {}
    for only in ("10.0.0.5", None):
        for client in ("127.0.0.1", "::1", "10.0.0.5", "10.0.0.7", "2001:db8::7"):
            async with browser(site, has_token=True, only_host=only, client=client) as each:
                status, answer = await ask(each, "ListGroupStates", headers)
                statuses[only, client] = status
                if status != 200:
                    assert "with PDMESH_TLS_DIR this page serves only" in answer["error"]["message"]
    refused = [case for case, status in statuses.items() if status == 403]
    assert refused == [("10.0.0.5", "10.0.0.7"), ("10.0.0.5", "2001:db8::7")]
    assert set(statuses.values()) == {200, 403}


async def test_the_page_runs_no_script_but_its_own(site: Site) -> None:
    async with browser(site) as client:
        page = await client.get("/")
        linked = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        scripts = {path.name: await client.get(f"/page/modules/{path.name}") for path in MODULES}
        others = [await client.get(f"/{path}") for path in linked]
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert sorted(linked) == ["page/icon.svg", "page/modules/main.js", "page/page.css"]
    assert {each.status_code for each in (*others, *scripts.values())} == {200}
    for each in scripts.values():
        assert each.headers["content-type"].startswith("text/javascript")
        imported = re.findall(r'from "\./([^"]+)"', each.text)
        assert set(imported) <= set(scripts)
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "http:", "https:"):
            assert sink not in each.text.replace("http://www.w3.org/2000/svg", "")
