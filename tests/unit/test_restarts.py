"""When a worker that has crashed is started again."""

from proxy.launcher.worker import (
    FIRST_DELAY_S,
    LOOP_CRASHES,
    LOOP_WINDOW_S,
    MAX_DELAY_S,
    SETTLED_S,
    RestartPolicy,
)


def test_the_first_restart_comes_at_once_and_later_ones_wait_longer():
    restarts = RestartPolicy()
    restarts.started_s = 0.0
    delays = [restarts.crashed(now_s) for now_s in range(1, 12)]
    assert delays[:4] == [0.0, FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays[-1] == MAX_DELAY_S
    assert delays == sorted(delays)
    assert restarts.count == 11


def test_one_that_has_lived_for_a_while_is_started_at_once_again():
    restarts = RestartPolicy()
    restarts.crashed(0.0)
    restarts.crashed(1.0)
    restarts.started_s = 2.0
    assert restarts.crashed(2.0 + SETTLED_S) == 0.0


def test_a_crash_loop_begins_and_ends():
    restarts = RestartPolicy()
    for now_s in range(LOOP_CRASHES):
        restarts.crashed(now_s)
    assert not restarts.is_looping
    restarts.crashed(LOOP_WINDOW_S)
    assert restarts.is_looping
    restarts.started_s = LOOP_WINDOW_S + 1
    restarts.crashed(LOOP_WINDOW_S + SETTLED_S)
    assert restarts.is_looping
    restarts.crashed(LOOP_WINDOW_S + 3 * SETTLED_S)  # it has not served since
    assert restarts.is_looping
    restarts.started_s = LOOP_WINDOW_S + 3 * SETTLED_S + 1
    restarts.crashed(LOOP_WINDOW_S + 4 * SETTLED_S + 1)
    assert not restarts.is_looping


def test_rare_crashes_are_no_loop():
    restarts = RestartPolicy()
    for number in range(4 * LOOP_CRASHES):
        assert restarts.crashed(number * LOOP_WINDOW_S) >= 0
    assert not restarts.is_looping
