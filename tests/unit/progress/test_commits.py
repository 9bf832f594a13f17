"""What is due to be committed: only completed offsets, and never backwards without a reason."""

import pytest
from progress_world import Client, configured, uuid

from proxy.progress.query import ProgressSettings, QuerySettings

GROUP = "orders-progress"
T0 = ("t", 0)


@pytest.fixture
def driver(world):
    """A driver whose first batch completed all below 50, which the group has."""
    driver = world.driver()
    driver.send("started")
    driver.batch(None, 50)
    commit(world)
    return driver


def commit(world):
    """Do what a committer does; return what was due."""
    due = world.registry.due_commits()
    for group, offsets in due.items():
        world.registry.committed(group, offsets, world.now_ms)
    return due.get(GROUP, {})


def test_what_is_only_delivered_is_not_due(world):
    Client(world).read(0, end=50)
    assert world.registry.due_commits() == {}


def test_what_a_batch_completed_is_due_until_it_is_committed(world, driver):
    driver.batch(50, 60)
    for _ in range(2):
        assert world.registry.due_commits() == {GROUP: {T0: 60}}
    commit(world)
    assert world.registry.due_commits() == {}
    assert world.document()["commit"] == {
        "group": GROUP,
        "last": world.now_s,
        "error": None,
        "backwards": 0,
    }


def test_what_completes_while_a_commit_is_under_way_stays_due(world, driver):
    driver.batch(50, 60)
    due = world.registry.due_commits()
    driver.batch(60, 70)
    world.registry.committed(GROUP, due[GROUP], world.now_ms)
    assert world.registry.due_commits() == {GROUP: {T0: 70}}


def test_what_failed_is_due_again_and_the_document_says_why(world, driver):
    driver.batch(50, 60)
    world.registry.commit_failed(GROUP, "no coordinator" + "." * 5000)
    document = world.document()["commit"]
    assert document["error"].startswith("no coordinator")
    assert len(document["error"]) == 1000
    assert commit(world) == {T0: 60}
    assert world.document()["commit"]["error"] is None


def test_only_partitions_that_moved_are_due(world, driver):
    driver.batch({0: 50}, {0: 50, 1: 9})
    assert commit(world) == {("t", 1): 9}


def test_a_query_without_a_group_commits_nothing(world):
    world.known.add("c")
    world.driver(client_id="c", query_id=uuid("other")).batch(None, 5)
    assert world.registry.due_commits() == {}
    assert world.document("orders (c)")["commit"] is None


def test_a_group_that_is_ahead_is_not_moved_back(world, driver):
    world.reopen()
    driver.restart("run-2", sender="s2")
    driver.batch(0, 30)
    world.registry.group_has(GROUP, {T0: 50, ("t", 9): 4})
    assert world.registry.due_commits() == {}
    driver.batch(30, 60)
    assert commit(world) == {T0: 60}


def test_a_replay_moves_nothing_back(world, driver):
    driver.restart("run-2")
    driver.batch(30, 50)
    assert commit(world) == {}
    driver.batch(50, 55)
    assert commit(world) == {T0: 55}


def test_a_reset_moves_the_group_back_and_is_reported(world, driver):
    driver.restart("run-2")
    driver.batch(0, 20)
    assert commit(world) == {T0: 20}
    assert world.kinds()[-1] == "committed_backwards"
    assert world.document()["commit"]["backwards"] == 1
    assert commit(world) == {}


def test_a_commit_that_was_under_way_at_a_reset_is_followed_by_one_back(world, driver):
    driver.batch(50, 60)
    due = world.registry.due_commits()
    driver.restart("run-2")
    driver.batch(0, 20)
    world.registry.committed(GROUP, due[GROUP], world.now_ms)
    assert commit(world) == {T0: 20}
    assert world.document()["commit"]["backwards"] == 1


def test_a_reset_that_has_caught_up_moves_nothing_back(world, driver):
    driver.restart("run-2")
    driver.batch(0, 20)
    driver.batch(20, 70)
    assert commit(world) == {T0: 70}
    assert world.document()["commit"]["backwards"] == 0


def test_the_right_to_go_back_is_used_up(world, driver):
    driver.restart("run-2")
    driver.batch(0, 20)
    commit(world)
    world.registry.group_has(GROUP, {T0: 40})
    driver.batch(20, 30)
    assert world.registry.due_commits() == {}


def test_a_topic_made_anew_moves_the_group_back(world, driver):
    world.part().accepts_topic_id(b"o" * 16, world.now_ms)
    world.part().accepts_topic_id(b"n" * 16, world.now_ms)
    assert world.registry.due_commits() == {}
    driver.batch(50, 5)
    assert commit(world) == {T0: 5}
    assert world.document()["commit"]["backwards"] == 1


def test_a_partition_that_is_let_go_is_not_due(world, driver):
    driver.batch(50, 60)
    world.query().revoke(world.part(), "gone", world.now_ms)
    assert world.registry.due_commits() == {}
    world.registry.committed(GROUP, {T0: 60}, world.now_ms)  # was under way
    assert world.query().partitions == {}


def test_another_group_gets_everything(world, driver):
    query = QuerySettings(name="orders", client_id="orders", commit_group="new")
    world.registry.update(ProgressSettings(queries=(query,)))
    assert world.registry.due_commits() == {"new": {T0: 50}}
    world.registry.committed(GROUP, {T0: 50}, world.now_ms)  # was under way
    assert world.registry.due_commits() == {"new": {T0: 50}}
    world.registry.update(
        ProgressSettings(queries=(QuerySettings(name="orders", client_id="orders"),))
    )
    assert world.registry.due_commits() == {}


def test_the_same_settings_again_make_nothing_due(world, driver):
    world.registry.update(configured("orders", "second"))
    assert world.registry.due_commits() == {}
