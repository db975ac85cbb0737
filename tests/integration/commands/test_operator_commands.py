"""Follows an operator's day with `pdmesh` on a real mesh of simulated engines. He makes a change,
waits for it, looks at the history and goes back.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import yaml

from tests.support.sites.command import Pdmesh, pdmesh
from tests.support.waiting import wait_until

__all__ = ["pdmesh"]


def groups(prefill: int, option: str = "sim_num_layers: 2") -> str:
    return f"""
services:
  model:
    options: {{{option}}}
scenarios:
  default: {{service: model, upgrade: {{soak_s: 1}}, allow_single: true}}
groups:
  chat: {{prefill: {prefill}, decode: 1}}
"""


def applied(pdmesh: Pdmesh, file: Path, text: str, *options: str) -> tuple[int, str]:
    """The exit code of `pdmesh apply --wait`, and its stderr."""
    file.write_text(text)
    done = pdmesh.run("apply", str(file), "--wait", *options)
    return done.returncode, done.stderr


@pytest.mark.timeout(600)
def test_a_change_is_applied_awaited_and_taken_back(pdmesh: Pdmesh, tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(groups(1))
    pdmesh.until_ready(
        pdmesh.up("--prefill", "0", "--decode", "0", "--blank", "6", "--groups", str(file))
    )
    code, said = applied(pdmesh, file, groups(2), "--reason", "more prefills")
    assert (code, said.splitlines()[-1]) == (
        0,
        "version 2 is rolled out: 1 of 1 groups are as desired",
    )
    states = yaml.safe_load(pdmesh.run("groups", "-o", "yaml").stdout)
    assert [len(group["members"]) for group in states["groups"]] == [3]

    examined = pdmesh.run("doctor", "--engine", "sim", "--groups", str(file), "--json")
    assert examined.returncode == 0, examined.stdout
    found = {each["subject"]: each for each in json.loads(examined.stdout)}
    for subject in ("leader", "services", "releases", "health", "clocks", "groups", "settings"):
        assert found[subject]["grade"] == "ok", found[subject]

    mistyped = pdmesh.run("drain", states["groups"][0]["members"][0]["instance_id"][:-1] + "_0")
    assert mistyped.returncode == 1
    assert "did you mean instance" in mistyped.stderr

    # The value must be a multiple of 8.
    code, said = applied(pdmesh, file, groups(2, "sim_token_bytes: 7"))
    assert code == 1
    assert re.search("upgrade of default: (going|went) back", said), said
    assert "BAD_OPTION" in said
    wait_until(lambda: "went back" in pdmesh.run("rollout", "status").stderr)

    # The mesh has too few instances for this.
    code, said = applied(pdmesh, file, groups(9), "--timeout", "5")
    assert code == 1
    assert "they wait for 4 more" in said
    assert "not rolled out after 5 s: " in said

    def is_seen() -> bool:
        late = pdmesh.run("rollout", "status", "--timeout", "2")
        return "0 of 1 groups are as desired; chat" in late.stderr

    wait_until(is_seen)

    back = pdmesh.run("rollback", "2", "--wait")
    assert back.returncode == 0, back.stderr
    assert "has the content of version 2" in back.stdout
    assert pdmesh.run("rollout", "status").stdout == (
        "version 6 is rolled out: 1 of 1 groups are as desired\n"
    )
    history = json.loads(pdmesh.run("history", "--limit", "5", "--json").stdout)["versions"]
    assert [version["version"] for version in history] == ["6", "5", "4", "3", "2"]
    assert history[2]["author"] == "master-scheduler"  # the master took the bad version back
    assert history[-1]["reason"] == "more prefills"
    assert all("text" not in version for version in history)
    assert "more prefills" in pdmesh.run("history").stdout


@pytest.mark.timeout(300)
def test_what_the_mesh_does_is_shown_while_it_does_it(pdmesh: Pdmesh) -> None:
    pdmesh.until_ready(pdmesh.up())
    top = pdmesh.start("top", "--every", "0.5")
    assert top.stdout is not None
    seen: set[str] = set()
    while not {"default", "prefill-0", "decode-0"} <= seen:
        pdmesh.chat()
        for line in top.stdout:
            seen.add(line.partition(" ")[0])
            if line.startswith("prefill-0"):  # this line ends one view of `pdmesh top`
                break
    top.send_signal(signal.SIGINT)
    assert top.wait(60) == 0

    log = pdmesh.start("logs", "--follow", "--json", "gateway-0", "-n", "1")
    assert log.stdout is not None
    assert json.loads(log.stdout.readline())["instance"] == "gateway-0"
    log.send_signal(signal.SIGINT)
    assert log.wait(60) == 0
