"""Which queries are followed: labels, bounds, and who is forgotten."""

from progress_world import FOREIGN, Client, ProgressWorld, configured, uuid

from proxy.progress.query import LEFT_AFTER_BATCHES, LIVE_MS, ProgressSettings, QuerySettings
from proxy.progress.query_registry import FORGET_AFTER_MS


def test_two_queries_with_one_name_have_two_labels(world):
    world.known |= {"a", "b"}
    for client_id in ("a", "b"):
        world.driver(
            name="same", client_id=client_id, query_id=uuid(client_id), sender=uuid(client_id)
        ).send("started")
    assert {query.name for query in world.registry.queries} == {"orders", "same", "same (b)"}


def test_the_configuration_has_the_first_choice_of_labels(world):
    world.known.add("a")
    world.driver(name="wanted", client_id="a", query_id=FOREIGN).send("started")
    world.registry.update(configured("orders", "wanted"))
    assert world.query("wanted").name == "wanted"
    assert world.query("a").name == "wanted (a)"


def test_names_may_be_swapped_in_the_configuration(world):
    def named(*pairs):
        return ProgressSettings(queries=tuple(QuerySettings(name=n, client_id=c) for n, c in pairs))

    world.registry.update(named(("x", "a"), ("y", "b")))
    world.registry.update(named(("y", "a"), ("x", "b")))
    assert (world.query("a").name, world.query("b").name) == ("y", "x")


def test_a_query_taken_out_of_the_configuration_stays_if_it_was_seen(world, driver):
    world.registry.update(configured("second"))
    world.wait(0)
    assert world.query().settings is None
    assert world.query().name == "orders"
    world.registry.update(configured("third"))
    assert world.query("second") is None


def test_who_is_followed_changes_the_generation(world):
    generation = world.registry.generation
    world.registry.follow("adaptive")
    assert world.registry.generation == generation + 1
    world.registry.follow("adaptive")
    assert world.registry.generation == generation + 1
    assert world.registry.query_of("adaptive").name == "adaptive"
    assert world.registry.query_of("nobody") is None
    assert world.registry.query_of(None) is None


def test_the_longest_gone_is_forgotten_first_and_never_one_that_is_live():
    world = ProgressWorld(ProgressSettings(max_queries=3))
    world.known |= {"a", "b", "c", "d", "e"}
    drivers = {}
    for name in "abc":
        world.wait(10_000)
        drivers[name] = world.driver(name=name, query_id=uuid(name), sender=uuid(name))
        drivers[name].batch(None, 5)
    assert not world.registry.follow("d")
    refused = world.driver(name="d", query_id=uuid("d"), sender=uuid("d")).refused(None, 5)
    assert refused == "unknown_query"
    world.wait(LIVE_MS - 15_000)
    assert world.registry.follow("d")
    assert world.query("a") is None
    assert world.kinds() == ["forgotten"]


def test_a_query_that_only_reads_is_live():
    world = ProgressWorld(ProgressSettings(max_queries=1))
    world.registry.follow("a")
    Client(world, world.query("a")).read(0)
    assert not world.registry.follow("b")
    world.wait(LIVE_MS)
    assert world.registry.follow("b")


def test_configured_queries_are_always_followed(world):
    world.registry.update(configured("a", "b", "c", max_queries=1))
    assert len(world.registry.queries) == 3
    assert not world.registry.follow("d")


def test_a_query_away_for_days_is_forgotten_unless_it_is_configured(world, driver):
    world.known.add("late")
    world.driver(name="late", query_id=FOREIGN, sender=uuid("s2")).batch(None, 5)
    world.wait(FORGET_AFTER_MS - 1)
    assert world.query("late") is not None
    world.wait(1)
    assert (world.query("late"), world.query() is not None) == (None, True)
    assert world.kinds()[-1] == "forgotten"


def test_a_partition_that_the_run_does_not_read_is_let_go(world, driver):
    driver.batch({0: 10, 1: 0}, {0: 20, 1: 30})
    driver.restart("run-2")
    for number in range(LEFT_AFTER_BATCHES):
        world.wait(0)
        assert ("t", 1) in world.query().partitions
        driver.batch(20 + number, 21 + number)
    world.wait(0)
    assert set(world.query().partitions) == {("t", 0)}
    assert world.kinds() == ["left"]


def test_a_partition_that_is_read_is_not_let_go(world, driver):
    client = Client(world)
    client.ask(0, partition=1)
    for number in range(LEFT_AFTER_BATCHES + 1):
        driver.batch(10 + number, 11 + number)
    world.wait(0)
    assert ("t", 1) in world.query().partitions


def test_a_query_that_goes_during_a_sweep_is_not_swept(world):
    world.known |= {"a", "b"}
    for client_id in ("a", "b"):
        ids = {"query_id": uuid(client_id), "sender": uuid(client_id)}
        world.driver(name=client_id, client_id=client_id, **ids).batch(None, 5)
    sweep = world.registry.sweeping(world.now_ms + FORGET_AFTER_MS - 1)
    next(sweep)
    gone = world.registry.query_of("b")
    world.registry.forget(gone, "as a test")
    events = len(gone.events)
    list(sweep)
    assert (world.registry.query_of("b"), len(gone.events)) == (None, events)
