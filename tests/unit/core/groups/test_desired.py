"""The desired state: what a file may say, its errors with their lines, and differences of files."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.groups.desired import (
    Change,
    Desired,
    Group,
    Scenario,
    ScheduleLine,
    Service,
    diff,
    revision_of,
)
from pdmesh.core.model import Role
from pdmesh.core.request.slo import ScenarioSlo
from pdmesh.desired_file import MAX_BYTES, MAX_EVENTS, read
from pdmesh.errors import InvalidRequest

SMALLEST = """\
groups:
  chat:
    prefill: 2
    decode: 2
"""
WHOLE = """\
services:
  assistant:
    model: smollm2
    model_dir: /models/smollm2
    manifests: {prefill: /models/p.json, decode: /models/d.json}
    options: {num_slots: 16}
    role_options:
      decode: {num_slots: 64}
    release: "2026-11"
scenarios:
  chat:
    service: assistant
    ratio: auto
    slo: {ttft_s: 4, ttft_s_per_1k_tokens: 0.5, default_text: later}
  summaries:
    service: assistant
    allow_single: true
groups:
  chat:
    scenario: chat
    count: 2
    prefill: 2
    decode: 1
    region: eu
    racks: [r1, r2]
  summaries: {scenario: summaries, fusion: 1}
schedules:
  - {at: "0 22 * * *", scenario: chat, lend: 1}
  - {at: "0 7 * * 1-5", scenario: chat, reclaim: 1}
regions: [eu]
"""


def test_the_smallest_file_has_four_lines() -> None:
    assert read(SMALLEST) == Desired(groups={"chat": Group("default", 2, 2)})
    assert read("") == Desired()


@pytest.mark.req("S10", "S17", "S21", "S54")
def test_everything_a_file_can_say() -> None:
    desired = read(WHOLE)
    service = Service(
        "smollm2", "/models/smollm2",
        {Role.PREFILL: "/models/p.json", Role.DECODE: "/models/d.json"},
        {"num_slots": "16"}, {Role.DECODE: {"num_slots": "64"}}, "2026-11",
    )  # fmt: skip
    assert desired.services == {"assistant": service}
    assert desired.scenarios["chat"].has_auto_ratio
    assert desired.scenarios["summaries"] == Scenario("assistant", allow_single=True)
    assert sorted(desired.groups) == ["chat-0", "chat-1", "summaries"]
    assert desired.groups["chat-1"] == Group("chat", 2, 1, region="eu", racks=("r1", "r2"))
    assert desired.scenarios["chat"].slo == ScenarioSlo(4.0, 0.5, "later")
    assert desired.schedules[0] == ScheduleLine("0 22 * * *", "chat", "lend", 1, "training")
    assert desired.regions == ("eu",)
    assert service.options_for(Role.DECODE) == {"num_slots": "64"}
    assert desired.service_of(desired.groups["chat-0"]) == service


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("groups: [a]", "groups", "line 1: groups: must be a mapping of names"),
        ("groups:\n  Chat: {}", "groups.Chat", "line 2: groups.Chat: a name must match"),
        ("groups:\n  a:\n    prefil: 2", "groups.a.prefil",
            "line 3: groups.a.prefil: is unknown"),
        ("groups:\n  a:\n    prefill: two", "groups.a.prefill",
            "line 3: groups.a.prefill: must be a whole"),
        ("groups:\n  a:\n    prefill: -1", "groups.a.prefill", "line 3"),
        ("groups:\n  a: {}", "groups.a", "line 2: groups.a: the group has no instances"),
        ("groups:\n  a: {prefill: 2}", "groups.a.decode",
            "line 2: groups.a.decode: a group with 2P:0D"),
        ("groups:\n  a: {fusion: 2}\n  a: {fusion: 2}", "groups.a",
            "line 3: groups.a: is there twice"),
        ("groups:\n  a: {fusion: 2, scenario: b}", "groups.a.scenario",
            "line 2: groups.a.scenario: there is no"),
        ("groups:\n  a: {fusion: 2, region: b}", "groups.a.region", "line 2"),
        ("groups:\n  a: {count: 2, prefill: 1}", "groups.a-0.decode", "line 2"),
        ("groups:\n  a-0: {fusion: 2}\n  a: {count: 1, fusion: 2}", "groups.a",
            "line 3: groups.a: its copy a-0"),
        ("groups:\n  a: {prefill: 2, decode: 1}", "groups.a",
            "line 2: groups.a: scenario default would depend"),
        ("scenarios:\n  a: {service: b}", "scenarios.a.service", "line 2"),
        ("scenarios:\n  a: {allow_single: maybe}", "scenarios.a.allow_single", "line 2"),
        ("scenarios:\n  a: {ratio: 3}", "scenarios.a.ratio",
            "line 2: scenarios.a.ratio: must be fixed or auto"),
        ("scenarios:\n  a: {slo: {}}", "scenarios.a.slo", "line 2: scenarios.a.slo: needs ttft_s"),
        ("scenarios:\n  a:\n    slo:\n      ttft_s: fast", "scenarios.a.slo.ttft_s",
            "line 4: scenarios.a.slo.ttft_s: must be a number"),
        ("groups:\n  a: {fusion: 2, racks: r1}", "groups.a.racks",
            "line 2: groups.a.racks: must be a list"),
        ("schedules:\n- {at: noon, lend: 1}", "schedules[0].at",
            "line 2: schedules[0].at: is not a cron"),
        ("schedules:\n- {at: 0 8 * * *}", "schedules[0]",
            "line 2: schedules[0]: needs at, and one of"),
        ("schedules:\n- {at: 0 8 * * *, lend: 1}", "schedules[0].scenario", "line 2"),
        ("schedules:\n- {at: 0 8 * * *, add: 1, remove: 1}", "schedules[0]",
            "line 2: schedules[0]: needs at, and one of"),
        ("schedules:\n- {at: 0 8 * * *, add: 1, pool: x}", "schedules[0].pool",
            "line 2: schedules[0].pool: add takes no"),
        ("schedules:\n- {at: 0 8 * * *, lend: 1, pool: off}", "schedules[0].pool",
            "line 2: schedules[0].pool: off is"),
        ("regions: [eu, {}]", "regions[1]", "line 1: regions[1]: must be a plain value"),
        ("groups: {a: [", "text", "line 1"),
        ("a: &x {}\nb: *x", "text", "line 1: anchors and aliases are not supported"),
        ("groups:\n  a: {fusion: !!int 2}", "text", "line 2: tags are not supported"),
        ("- a\n" * MAX_EVENTS, "text",
            f"line {MAX_EVENTS - 2}: more than {MAX_EVENTS} names and values"),
        ("- a\n" * (MAX_BYTES // 4 + 1), "text", "the desired state is longer than"),
        ("\ud800", "text", "line 1"),
        ("[" * 20 + "]" * 20, "text", "line 1: is nested too deeply"),
        ("one: 1\n---\ntwo: 2", "text", "line 2"),
        ("\0", "text", "line 1"),
    ],
)  # fmt: skip
def test_errors_have_a_line_and_a_field(text: str, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(text)
    assert caught.value.field == field
    assert caught.value.message.startswith(message)


@given(st.text(alphabet="ab:{}[]- \n#&*!|>'\"0", max_size=60))
def test_any_text_is_either_read_or_refused_as_an_invalid_request(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        read(text)


@pytest.mark.req("S31")
def test_a_single_instance_must_be_asked_for_by_name() -> None:
    text = SMALLEST.replace("2", "1")
    with pytest.raises(InvalidRequest, match="single prefill"):
        read(text)
    assert read(text + "scenarios:\n  default: {allow_single: true}").groups["chat"].prefill == 1


def test_a_difference_names_each_value() -> None:
    after = read(SMALLEST.replace("prefill: 2", "prefill: 3") + "  more: {fusion: 2}\n")
    changes = diff(read(SMALLEST), after)
    assert Change("groups.chat.prefill", "2", "3") in changes
    assert Change("groups.more.fusion", None, "2") in changes
    assert not any(change.path == "groups.chat.decode" for change in changes)
    assert diff(after, after) == []


def test_a_difference_uses_the_words_of_the_file_and_leaves_out_defaults() -> None:
    before = read(SMALLEST)
    text = """\
groups:
  chat: {prefill: 2, decode: 2}
  more: {fusion: 2}
scenarios:
  default: {ratio: auto, upgrade: {soak_s: 5}}
schedules:
- {at: 0 8 * * *, scenario: default, lend: 1}
"""
    assert [(c.path, c.before, c.after) for c in diff(before, read(text))] == [
        ("groups.more.fusion", None, "2"),
        ("scenarios.default.ratio", None, "auto"),
        ("scenarios.default.upgrade.soak_s", None, "5"),
        ("schedules[0].at", None, "0 8 * * *"),
        ("schedules[0].lend", None, "1"),
        ("schedules[0].scenario", None, "default"),
    ]
    fixed = read(text.replace("auto", "fixed"))
    assert diff(read(text), fixed) == [Change("scenarios.default.ratio", "auto", "fixed")]


@pytest.mark.req("S24")
def test_a_revision_changes_with_everything_that_keeps_two_instances_from_pairing() -> None:
    base = revision_of(Service("m"), "ucx/1")
    assert revision_of(Service("m"), "ucx/1") == base
    others = [Service("n"), Service("m", release="2"), Service("m", options={"block_size": "32"})]
    revisions = {revision_of(each, "ucx/1") for each in others} | {
        revision_of(Service("m"), "ucx/2")
    }
    assert len(revisions | {base}) == 5
    assert revision_of(Service(), "ucx/1") == ""


SCHEDULES = """\
groups:
  chat: {prefill: 2, decode: 2}
schedules:
"""
NIGHT = "- {at: 0 22 * * *, scenario: default, lend: 1}\n"
MORNING = "- {at: 0 8 * * *, scenario: default, reclaim: 1}\n"
NOON = "- {at: 0 12 * * *, scenario: default, lend: 1}\n"


def test_a_schedule_is_the_same_wherever_its_line_stands() -> None:
    before = read(SCHEDULES + NIGHT + MORNING)
    inserted = diff(before, read(SCHEDULES + NOON + NIGHT + MORNING))
    assert [(c.path, c.before, c.after) for c in inserted] == [
        ("schedules[0].at", None, "0 12 * * *"),
        ("schedules[0].lend", None, "1"),
        ("schedules[0].scenario", None, "default"),
    ]
    removed = diff(before, read(SCHEDULES + MORNING))
    assert {(c.path, c.after) for c in removed} == {
        (f"schedules[0].{name}", None) for name in ("at", "lend", "scenario")
    }
    assert diff(before, read(SCHEDULES + MORNING + NIGHT.replace("0 22", "0  22"))) == []


def test_a_second_equal_schedule_is_a_difference() -> None:
    changes = diff(read(SCHEDULES + NIGHT), read(SCHEDULES + NIGHT + NIGHT))
    assert {c.path for c in changes} == {
        f"schedules[1].{name}" for name in ("at", "lend", "scenario")
    }


def test_a_changed_schedule_is_shown_by_its_changed_fields() -> None:
    after = read(SCHEDULES + NIGHT + MORNING.replace("reclaim: 1", "reclaim: 2"))
    assert diff(read(SCHEDULES + NIGHT + MORNING), after) == [
        Change("schedules[1].reclaim", "1", "2")
    ]


@pytest.mark.req("S67")
def test_an_option_may_have_parts() -> None:
    """The parts reach the instance as JSON, which the instance's settings parse."""
    text = """
services:
  a:
    options: {block_size: 64, speculation: {method: prompt_lookup, k: 4}}
    role_options: {decode: {speculation: {method: none}}}
"""
    service = read(text).services["a"]
    assert service.options_for(Role.FUSION) == {
        "block_size": "64",
        "speculation": '{"method": "prompt_lookup", "k": "4"}',
    }
    assert service.options_for(Role.DECODE)["speculation"] == '{"method": "none"}'


@pytest.mark.parametrize("value", ["[prompt_lookup]", "{method: {a: b}}", "{method: [a]}"])
def test_the_parts_of_an_option_are_plain_values(value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(f"services:\n  a:\n    options:\n      speculation: {value}")
    assert (refused.value.field or "").startswith("services.a.options.speculation")
    assert "must be a plain value" in refused.value.message


DRAFT = "speculation: {method: draft_model, model: /m/small}"


@pytest.mark.req("S67")
@pytest.mark.parametrize(
    ("options", "of_prefill", "of_decode", "at"),
    [
        ("", "", DRAFT, "role_options.decode"),
        (DRAFT, "", "speculation: {method: none}", "role_options.decode"),
        (DRAFT, "speculation: {method: prompt_lookup}", "", "role_options.prefill"),
        ("", DRAFT, DRAFT.replace("small", "other"), "role_options.decode"),
    ],
)
def test_a_draft_that_only_one_role_has_is_refused(
    options: str, of_prefill: str, of_decode: str, at: str
) -> None:
    """The KV of the two roles would differ, so each instance would have to do both phases."""
    roles = f"{{prefill: {{{of_prefill}}}, decode: {{{of_decode}}}}}"
    text = f"services:\n  a:\n    options: {{{options}}}\n    role_options: {roles}\n"
    with pytest.raises(InvalidRequest) as refused:
        read(text)
    assert refused.value.field == f"services.a.{at}.speculation"
    for role, own in (("prefill", of_prefill), ("decode", of_decode)):
        assert f"services.a.{f'role_options.{role}' if own else 'options'}.speculation" in (
            refused.value.message
        )


@pytest.mark.req("S67")
def test_a_draft_that_both_roles_have_is_taken() -> None:
    of_both = f"{{prefill: {{{DRAFT}}}, decode: {{{DRAFT}}}}}"
    read(f"services:\n  a:\n    options: {{{DRAFT}}}\n  b:\n    role_options: {of_both}\n")


def test_arguments_of_vllm_may_be_mappings_and_lists() -> None:
    args = "{hf_overrides: {rope_theta: 1e6, names: [a, '7']}, enforce_eager: true, x: ''}"
    options = f"services:\n  a:\n    options:\n      engine_args: {args}\n"
    assert json.loads(read(options).services["a"].options["engine_args"]) == {
        "hf_overrides": {"rope_theta": 1e6, "names": ["a", "7"]},
        "enforce_eager": True,
        "x": "",
    }


def test_arguments_of_vllm_that_change_kv_are_those_of_both_roles() -> None:
    roles = "{decode: {engine_args: {quantization: awq}}}"
    with pytest.raises(InvalidRequest) as refused:
        read(f"services:\n  a:\n    role_options: {roles}\n")
    assert refused.value.field == "services.a.role_options.decode.engine_args"
    read(f"services:\n  a:\n    role_options: {roles.replace('quantization', 'log_level')}\n")
