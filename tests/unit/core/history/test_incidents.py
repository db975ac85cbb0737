"""An incident records what went wrong with an instance and what was done about it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.history.ended_request import EndedRequest, InstanceLoss
from pdmesh.core.history.incidents import (
    MAX_INCIDENTS,
    FaultTurned,
    HealthTurned,
    IncidentBook,
    IncidentEvent,
    MemberStepped,
    Ordered,
    Trouble,
)

DEAD = HealthTurned("d-0", 1, "dead", "lease_expired")


def lost(instance_id: str = "d-0", outcome: str = "completed") -> EndedRequest:
    return EndedRequest("r", "chat", outcome, losses=(InstanceLoss(1.0, (instance_id,), "gone"),))


def after(*events: tuple[float, IncidentEvent]) -> list[Trouble]:
    book = IncidentBook()
    for at, event in events:
        book.handle(event, at)
    book.check_invariants()
    return book.latest()


def whats(trouble: Trouble) -> list[str]:
    return [what for _, what in trouble.steps]


def test_a_death_ends_when_another_instance_serves_in_its_place() -> None:
    """Requests notice a death before the health-monitor does. So the incident also counts requests
    that migrated before the verdict.
    """
    (trouble,) = after(
        (9.0, lost()),
        (10.0, HealthTurned("d-0", 1, "suspect", "heartbeat_missed")),
        (11.0, DEAD),
        (11.1, MemberStepped("d-0", 1, "lost", "chat")),
        (11.2, MemberStepped("i-7", 5, "assigned", "chat", "decode", "d-0")),
        (11.5, lost(outcome="failed")),
        (12.0, MemberStepped("i-7", 5, "serving", "chat", "decode")),
    )
    assert (trouble.began_at, trouble.ended_at, trouble.cause) == (
        10.0,
        12.0,
        "dead: its lease ended",
    )
    assert (trouble.num_moved, trouble.num_failed) == (1, 1)
    assert whats(trouble) == [
        "judged suspect: no heartbeat",
        "judged dead: its lease ended",
        "group chat: lost",
        "i-7 takes its place as decode in chat",
        "i-7 serves in its place",
    ]


LOST = MemberStepped("d-0", 1, "lost", "chat")
ASSIGNED = MemberStepped("i-7", 5, "assigned", "chat", "decode", "d-0")
SERVING = MemberStepped("i-7", 5, "serving", "chat", "decode")
SUSPECT = HealthTurned("d-0", 1, "suspect", "heartbeat_missed")
WELL = HealthTurned("d-0", 1, "healthy", "heartbeat_resumed")


def test_steps_that_arrive_before_the_verdict_belong_to_the_incident_that_it_opens() -> None:
    """The master and the health-monitor notice a death independently of each other."""
    (trouble,) = after((10.0, LOST), (10.1, ASSIGNED), (10.2, DEAD), (10.9, SERVING))
    assert trouble.steps == [
        (10.0, "group chat: lost"),
        (10.1, "i-7 takes its place as decode in chat"),
        (10.2, "judged dead: its lease ended"),
        (10.9, "i-7 serves in its place"),
    ]
    assert trouble.ended_at == 10.9


def test_if_the_successor_serves_already_the_verdict_ends_the_incident() -> None:
    (trouble,) = after((10.0, LOST), (10.1, ASSIGNED), (10.2, SERVING), (10.3, DEAD))
    assert whats(trouble)[-2:] == ["i-7 serves in its place", "judged dead: its lease ended"]
    assert trouble.ended_at == 10.3
    (trouble,) = after((10.0, SUSPECT), (10.1, ASSIGNED), (10.2, SERVING), (10.3, DEAD))
    assert trouble.ended_at == 10.3


def test_early_steps_wait_although_an_earlier_incident_of_the_process_has_just_ended() -> None:
    (trouble,) = after(
        (1.0, SUSPECT), (2.0, WELL), (10.0, LOST), (10.1, ASSIGNED), (10.2, DEAD), (11.0, SERVING)
    )
    assert whats(trouble)[:2] == ["group chat: lost", "i-7 takes its place as decode in chat"]
    assert trouble.ended_at == 11.0


def test_an_early_step_is_shown_although_its_successor_has_an_incident_of_its_own() -> None:
    fault = FaultTurned("i-7", 5, 1, ("slow",), "ignore")
    found = after((10.0, LOST), (10.1, ASSIGNED), (10.15, fault), (10.2, DEAD), (11.0, SERVING))
    (trouble,) = [each for each in found if each.instance_id == "d-0"]
    assert (trouble.successor, trouble.ended_at) == ("i-7", 11.0)


def test_the_successor_of_a_process_that_left_in_order_replaces_no_later_process() -> None:
    left, back = (
        HealthTurned("d-0", n, "healthy", c) for n, c in ((1, "deregistered"), (2, "new"))
    )
    dead = HealthTurned("d-0", 2, "dead", "lease_expired")
    (trouble,) = after((10.0, ASSIGNED), (11.0, left), (20.0, back), (40.0, dead), (45.0, SERVING))
    assert whats(trouble) == ["judged dead: its lease ended"]
    assert (trouble.successor, trouble.ended_at) == ("", 0.0)


def test_an_early_step_of_another_incarnation_or_of_long_ago_is_not_shown() -> None:
    (trouble,) = after((1.0, MemberStepped("d-0", 7, "lost", "chat")), (2.0, DEAD))
    assert whats(trouble) == ["judged dead: its lease ended"]
    (trouble,) = after((1.0, LOST), (100.0, DEAD))
    assert whats(trouble) == ["judged dead: its lease ended"]


def test_a_suspicion_ends_with_the_next_heartbeat_and_a_death_with_the_next_process() -> None:
    (one,) = after(
        (1.0, HealthTurned("d-0", 1, "suspect", "heartbeat_missed")),
        (2.0, HealthTurned("d-0", 1, "healthy", "heartbeat_resumed")),
    )
    assert (one.ended_at, whats(one)[-1]) == (2.0, "healthy again: heartbeats again")
    (other,) = after((1.0, DEAD), (2.0, HealthTurned("d-0", 2, "healthy", "registered")))
    assert (other.ended_at, whats(other)[-1]) == (2.0, "a new process with its name registered")


def test_a_fault_tells_its_reasons_its_action_and_whether_it_is_held_back() -> None:
    (trouble,) = after(
        (1.0, FaultTurned("d-0", 1, 3, ("ECC",), "replace_instance")),
        (2.0, FaultTurned("d-0", 1, 3, ("ECC",), "replace_instance", "panic")),
        (3.0, Ordered("d-0", "taken out of service by ann")),
        (9.0, FaultTurned("d-0", 1, 0)),
    )
    assert whats(trouble) == [
        "fault of level 3: ECC: it is replaced",
        "fault of level 3: ECC: held back (panic)",
        "taken out of service by ann",
        "no fault is found any more",
    ]
    assert trouble.ended_at == 9.0


def test_an_orderly_leave_a_first_registration_and_an_old_loss_are_no_incidents() -> None:
    assert (
        after(
            (1.0, HealthTurned("d-0", 1, "healthy", "registered")),
            (2.0, HealthTurned("d-0", 1, "dead", "deregistered")),
            (3.0, lost()),
        )
        == []
    )
    (trouble,) = after((1.0, lost()), (100.0, DEAD))
    assert trouble.num_moved == 0


NAMES = st.sampled_from(["a", "b", "c"])
EVENTS = st.one_of(
    st.builds(
        HealthTurned, NAMES, st.integers(1, 3), st.sampled_from(["healthy", "suspect", "dead"]),
        st.sampled_from(["registered", "deregistered", "lease_expired", "new"]),
    ),
    st.builds(FaultTurned, NAMES, st.integers(1, 3), st.integers(0, 5)),
    st.builds(
        MemberStepped, NAMES, st.integers(1, 3), st.sampled_from(["lost", "serving"]),
        st.just("g"), st.just("decode"), st.one_of(st.just(""), NAMES),
    ),
    st.builds(Ordered, NAMES, st.text(max_size=5)),
    st.builds(lost, NAMES, st.sampled_from(["completed", "failed"])),
)  # fmt: skip


@given(st.lists(EVENTS, max_size=200))
def test_its_bounds_hold_whatever_happens(events: list[IncidentEvent]) -> None:
    after(*((float(at), event) for at, event in enumerate(events)))


def test_the_oldest_incidents_are_dropped() -> None:
    events = [HealthTurned(f"d-{n}", 1, "dead", "lease_expired") for n in range(3 * MAX_INCIDENTS)]
    found = after(*((float(at), event) for at, event in enumerate(events)))
    assert [t.instance_id for t in found][-1] == f"d-{3 * MAX_INCIDENTS - 1}"
    assert len(found) == MAX_INCIDENTS
