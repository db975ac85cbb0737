import pytest

from pdmesh.core.kv.tiers.disk_health import DiskHealth, DiskState


@pytest.mark.fault("F33")
def test_a_failed_write_makes_the_disk_read_only_until_a_probe_succeeds() -> None:
    disk = DiskHealth(first_s=1.0, most_s=4.0)
    assert disk.may_write(0.0)
    assert disk.wrote(False, 0.0), "the state changed"
    assert disk.state is DiskState.READ_ONLY
    assert disk.may_read(0.1)
    assert not disk.may_write(0.9)
    assert disk.may_write(1.0), "the probe"
    assert not disk.may_write(1.0), "one at a time"
    assert not disk.wrote(False, 1.0), "no news"
    assert not disk.may_write(2.9), "the interval doubled"
    assert disk.may_write(3.0)
    assert disk.wrote(True, 3.0)
    assert disk.state is DiskState.OK
    assert disk.may_write(3.0)
    assert disk.may_write(3.0)


@pytest.mark.fault("F33")
def test_intervals_are_bounded() -> None:
    disk = DiskHealth(first_s=1.0, most_s=4.0)
    now = 0.0
    for _ in range(10):
        assert disk.may_write(now)
        disk.wrote(False, now)
        now += 4.0


@pytest.mark.fault("F33")
def test_reads_are_tried_less_often_after_several_failures_in_a_row() -> None:
    disk = DiskHealth(first_s=1.0, max_read_failures=3)
    assert not disk.read(False, 0.0)
    assert not disk.read(True, 0.0)
    assert not disk.read(False, 0.0)
    assert not disk.read(False, 0.0)
    assert disk.may_read(0.0)
    assert disk.read(False, 0.0)
    assert disk.state is DiskState.OFF
    assert not disk.may_read(0.5)
    assert disk.may_read(1.0)
    assert disk.read(True, 1.0)
    assert disk.state is DiskState.OK


@pytest.mark.fault("F33")
def test_a_write_that_hangs_makes_the_disk_read_only_until_it_succeeds() -> None:
    disk = DiskHealth(hang_s=1.0)
    assert not disk.watch(None, 0.0, 0.9)
    assert disk.watch(None, 0.0, 1.0), "the state changed"
    assert disk.state is DiskState.READ_ONLY
    assert not disk.may_write(100.0), "a probe would hang, too"
    assert disk.may_read(100.0)
    assert not disk.watch(None, None, 101.0), "it ended, but its result is not known yet"
    assert disk.wrote(True, 101.0)
    assert disk.state is DiskState.OK


@pytest.mark.fault("F33")
def test_a_read_that_hangs_turns_the_disk_off_and_one_probe_follows_if_it_fails() -> None:
    disk = DiskHealth(first_s=1.0, hang_s=1.0)
    assert disk.watch(0.0, None, 5.0)
    assert disk.state is DiskState.OFF
    assert not disk.may_read(50.0)
    assert not disk.read(False, 60.0)
    assert not disk.watch(None, None, 60.0)
    assert not disk.may_read(60.5)
    assert disk.may_read(63.0), "the probe"
    assert disk.read(True, 63.1)


@pytest.mark.fault("F33")
def test_an_operation_that_succeeds_while_another_hangs_does_not_turn_the_disk_on() -> None:
    disk = DiskHealth(hang_s=1.0)
    disk.watch(0.0, None, 1.0)
    assert not disk.read(True, 1.1)
    assert disk.state is DiskState.OFF
    assert not disk.may_read(1.1)
    assert disk.watch(None, None, 1.2), "all operations have ended, and one succeeded"
    assert disk.state is DiskState.OK
