"""Named points: every frame is recognised however it is cut; a daemon dies, stops or holds where it
was told to."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.messages import Goodbye, Message, Ping, Pong
from tests.processes.director import Director
from tests.processes.pointed_daemon import FrameTracker, Order
from tests.processes.points import PointsOf
from tests.processes.swarms import GPT, manifest

MESSAGES = {"Ping": Ping(number=1), "Pong": Pong(number=2), "Goodbye": Goodbye(fault="x" * 50)}


@given(st.lists(st.sampled_from(sorted(MESSAGES)), max_size=8), st.lists(st.integers(1, 100)))
def test_frames_are_recognised_however_they_are_cut(names: list[str], sizes: list[int]) -> None:
    frames: list[Message] = [MESSAGES[name] for name in names]
    data = b"".join(encode(frame) for frame in frames)
    tracker = FrameTracker()
    begun, ended = [], []
    for size in [*sizes, len(data)]:
        piece, data = data[:size], data[size:]
        told = tracker.follow(piece)
        begun += told[0]
        ended += told[1]
        assert len(begun) - len(ended) in (0, 1)
    assert begun == ended == names


def test_an_order_counts_what_it_names() -> None:
    order = Order("kill", "before-send:Ping", 2)
    points = ["before-send:Ping", "before-send:Pong", "before-send:Ping", "before-send:Ping"]
    assert [order.counts(point) for point in points] == [False, False, True, False]
    order = Order("kill", "before-save", 2)
    assert [order.counts(point) for point in ("before-save:a", "before-save:b")] == [False, True]
    assert not Order("kill", "before", 1).counts("before-save:a")


@pytest.mark.processes
def test_a_daemon_dies_at_a_point(tmp_path: Path) -> None:
    with (
        PointsOf(tmp_path / "points") as points,
        Director(tmp_path, manifest(GPT), peers=1, stages=1) as director,
    ):
        points.order("kill", "before-executor:commit", 3)
        founder = director.found(points=points)
        assert director.wait_for_end(founder) == -signal.SIGKILL
        assert points.reached("before-executor:commit") == 3
        assert points.reached("after-executor:commit") == 2
        assert points.reached("before-save") == points.reached("after-save") > 0
        points.forget_orders()
        director.restart(founder)
        assert director.status(founder)["peer"]["boot"] == 2


@pytest.mark.processes
def test_a_daemon_holds_at_a_point_and_goes_on(tmp_path: Path) -> None:
    with (
        PointsOf(tmp_path / "points") as points,
        Director(tmp_path, manifest(GPT), peers=1, stages=1) as director,
    ):
        points.order("hold", "before-executor:commit", 2)
        founder = director.found(points=points)
        points.wait_for("before-executor:commit", 2)
        assert director.status(founder)["peer"]["version"] == 1
        points.go_on()
        director.wait_for_version(6)
        assert points.reached("after-executor:commit") == 6


@pytest.mark.processes
def test_a_daemon_stops_when_it_sends(tmp_path: Path) -> None:
    """The first plan waits for a third daemon: this one says nothing but heartbeats."""
    with (
        PointsOf(tmp_path / "points") as points,
        Director(tmp_path, manifest(GPT), peers=3, stages=3) as director,
    ):
        director.found()
        points.order("stop", "before-send:Heartbeat", 3)
        other = director.join(points=points)
        points.wait_for("before-send:Heartbeat", 3)
        stopped = os.waitid(os.P_PID, director.pid(other), os.WSTOPPED | os.WNOWAIT)
        assert stopped is not None and stopped.si_status == signal.SIGSTOP
        assert points.reached("after-send:Heartbeat") == 2
        assert points.reached("received:LeaderBeat") >= 1
        director.resume(other)
        points.wait_for("after-send:Heartbeat", 4)
