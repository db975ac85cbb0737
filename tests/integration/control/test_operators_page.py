"""Lets an operator look at a mesh under load in a browser and change a ratio by hand. No request
may fail (S21, S27, S28).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from tests.support.sites.groups import asking, spec
from tests.support.sites.operator import CHANGE_S, Operator
from tests.support.waiting import until

GROUPS = "groups:\n  chat: {scenario: default, prefill: 2, decode: 2}\n"


@pytest.mark.timeout(300)
@pytest.mark.req("S21", "S27", "S28")
async def test_a_ratio_is_changed_in_a_browser_under_load_and_no_request_fails(
    tmp_path: Path,
) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(GROUPS)
    async with (
        Mesh(spec(file, num_blank=5), tmp_path / "mesh") as mesh,
        httpx.AsyncClient() as http,
    ):
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Operator(bus)
        await operator.until_serving(2, 2)
        url = (await operator.groups()).page_url
        assert (await http.get(url)).headers["content-type"].startswith("text/html")

        async def ask(method: str, **request: Any) -> Any:
            answer = await http.post(f"{url}admin/{method}", json=request)
            assert answer.status_code == 200, answer.text
            return answer.json()

        async with asking(mesh.http_url) as outcomes:
            await until(lambda: len(outcomes) > 10, within_s=CHANGE_S)
            moves = [{"group_id": "chat", "kind": "add", "role": "decode"}]
            asked = await ask("PlanMoves", moves=moves, reason="longer answers")
            assert [d["action"] for d in asked["decisions"]] == ["planned"]
            await operator.until_serving(2, 3)
            moves = [{"group_id": "chat", "kind": "change_role", "role": "prefill"}]
            await ask("PlanMoves", moves=moves, is_forced=True)
            await operator.until_serving(3, 2)

            async def are_told() -> bool:
                told = (await ask("ListGroupStates"))["decisions"]
                return [d["action"] for d in told].count("ended") == 2

            await until(are_told, within_s=CHANGE_S)
            states = await ask("ListGroupStates")
            assert [a["reason"] for a in states["adjustments"]] == ["asked for by an operator"]
        assert [o for o in outcomes if not o.is_complete] == []
        await bus.close()
