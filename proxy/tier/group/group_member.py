"""Be a member of a tier's group: join, learn the map, stay, leave.

Rounds (JoinGroup, SyncGroup) and heartbeats go over two connections: a round may take as long as
the session of a member that died, and all the while the coordinator has to hear of this one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kafka.protocol.admin import DescribeGroupsRequest, ListGroupsRequest
from structlog import get_logger

from proxy.cluster.broker_connection import BrokerConnection
from proxy.cluster.kafka_client import GROUP_COORDINATOR, Bootstrap, KafkaClient
from proxy.cluster.upstream import (
    NOT_READY,
    Address,
    NonRetriableError,
    UpstreamError,
    misread_is_bad_response,
)
from proxy.errors import ProxyError
from proxy.state import GroupFence
from proxy.tasks import wait_at_most
from proxy.tier.slot_balance import Placement, place_slots

from .assignor import sync_group_assignments
from .group_documents import NO_GENERATION, Assignment, RefusedMember, Subscription, UserDataError
from .group_protocol import (
    MEMBER_ID_REQUIRED,
    NO_MEMBER_ID,
    PROTOCOL_TYPE,
    REBALANCE_IN_PROGRESS,
    ErrorAction,
    action_for_error,
    explain_refusal,
    heartbeat_request,
    join_request,
    leave_request,
    sync_request,
)
from .slot_states import SlotStates

SESSION_TIMEOUT_S = 10.0
"""A dead member's slots are given away after it. Brokers allow 6 s and more by default, and a
coordinator that moves to another broker takes some of it."""

HEARTBEAT_INTERVAL_S = 1.0
"""So soon a member learns of a round, and of a dead coordinator."""

UNSETTLED_INTERVAL_S = 0.2
"""Between heartbeats while slots wait for another round."""

BEAT_AGAIN_S = 0.3
"""After a heartbeat that was not answered."""

ANSWER_LIMIT_S = 2.0
"""To connect, and for each answer but a round's; several tries fit into a session."""

ROUND_MARGIN_S = 5.0
"""The coordinator answers a round after the rebalance timeout at the latest, and may be slow."""

HOLD_INTERVAL_S = 0.5
"""Between two questions to the others while the coordinator is not heard: for so long two members
may serve one slot, where it was heard by the others alone."""

REJOIN_INTERVAL_S = 5.0
"""Between two rounds that this member asks for."""

RELEASE_LIMIT_S = 5.0
"""For what has to be done before a slot is given to another member."""

CLOCKS_APART_S = 300.0
"""Clocks further apart are worth a warning; times in records are by their writers' clocks."""

MIN_JOIN_BACKOFF_S = 0.1
MAX_JOIN_BACKOFF_S = 2.0
"""Between two tries to join; doubled from try to try."""

LIST_VERSION, DESCRIBE_VERSION = 2, 4
"""Of the requests for groups, and for their members with their names (since Kafka 2.4)."""

_log = get_logger(__name__)


class MembershipError(ProxyError):
    """The process cannot be in the group, and waiting does not mend that."""


class GroupSessionHealth:
    """What a member knows of its session, by its own clock; times are in seconds."""

    def __init__(self, group_id: str, timeout_s: float) -> None:
        self._group_id, self._timeout_s = group_id, timeout_s
        self.ends_s: float | None = None
        """Until when the brokers keep the member at least; None: there is no session."""
        self.problem: str | None = None
        """Why the member is not in the tier, or may soon be out of it; None: it is in."""
        self._has_failed = False
        """Whether the last try to reach the coordinator failed, which by itself is no problem."""

    def extend(self, sent_s: float) -> None:
        """Begin the session anew, as of a request that was sent then and is answered."""
        self.ends_s = max(sent_s + self._timeout_s, self.ends_s or 0.0)

    def failed(self, error: str) -> None:
        """Count a try that failed. One by itself is no problem: coordinators move."""
        if self._has_failed:
            self.set_problem(error)
        self._has_failed = True

    def set_problem(self, problem: str | None) -> None:
        """Log a problem, and when it is over."""
        self._has_failed = False
        if problem is not None and problem != self.problem:
            _log.warning("not sure of the tier", group=self._group_id, error=problem)
        elif problem is None and self.problem is not None:
            _log.info("in the tier again", group=self._group_id)
        self.problem = problem


class GroupMember:
    """One member of a group, which has `slots` by what that decides.

    `announce` is called for each round and says what the member is by then; its name must stay the
    same. `on_assigned()` is called after each round, and then `on_revoked(slots)`, in a task, when
    slots are to be released. When it returned, or was cancelled after RELEASE_LIMIT_S, others get
    them: nothing may be written for them any more. `on_lost()`: all slots may have new owners by
    now; nothing may be written for any, until the next `on_assigned`. Those two are not awaited,
    and must be quick. `may_hold(generation)` says, when the coordinator is not heard, whether
    nobody can have got slots since that generation.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        group_id: str,
        slots: SlotStates,
        announce: Callable[[], Subscription],
        *,
        on_assigned: Callable[[], None],
        on_revoked: Callable[[frozenset[int]], Awaitable[None]],
        on_lost: Callable[[], None],
        may_hold: Callable[[int], Awaitable[bool]],
        place: Placement = place_slots,
        session_timeout_s: float = SESSION_TIMEOUT_S,
    ) -> None:
        self._bootstrap = bootstrap
        self._client = KafkaClient(bootstrap, ANSWER_LIMIT_S)
        self._slots, self._announce, self._placement = slots, announce, place
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._may_hold = may_hold
        self._is_holding = False
        """Whether the session is over, and the last map holds all the same."""
        self.name = announce().name
        """As what Kafka knows its place, too (group.instance.id)."""
        self.fence = GroupFence(group_id, NO_GENERATION, NO_MEMBER_ID, self.name)
        """By what the coordinator knows this process, since it joined last."""
        self._session_timeout_s = session_timeout_s
        self._coordinator_key = GROUP_COORDINATOR, group_id
        self._session = GroupSessionHealth(group_id, session_timeout_s)
        self._wanted = asyncio.Event()
        """A round is wanted, by us or by another member."""
        self._stopping = asyncio.Event()
        self._beats_now = asyncio.Event()
        self._round: asyncio.Task[bool] | None = None
        self._releases: set[asyncio.Task[None]] = set()
        self._asked_s = -REJOIN_INTERVAL_S
        self._asking: asyncio.TimerHandle | None = None

    @property
    def problem(self) -> str | None:
        """Why the member is not in the tier, or may soon be out of it; None: it is in."""
        return self._session.problem

    @property
    def refusal(self) -> RefusedMember | None:
        """Why the tier refused this member; None: it did not."""
        newest = self._slots.assignment
        return None if newest is None else newest.refused.get(self.fence.member_id)

    def request_rebalance(self, *, at_once: bool = False) -> None:
        """Have a round soon, in which all members announce themselves anew.

        For new addresses or loads; at most one in REJOIN_INTERVAL_S, unless `at_once`.
        """
        if at_once:
            self._wanted.set()
        elif self._asking is None:
            loop = asyncio.get_running_loop()
            wait_s = max(0.0, self._asked_s + REJOIN_INTERVAL_S - time.monotonic())
            self._asking = loop.call_later(wait_s, self._ask_now)

    def stop(self) -> None:
        """Release all slots, leave the group and let `run` return."""
        self._stopping.set()
        self._wanted.set()
        self._interrupt()

    async def run(self) -> None:
        """Be a member until `stop`; when cancelled, the place is kept for a session's time.

        Raises MembershipError: another process has the member's name, or the group is of another
        kind.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._beat()), tasks.create_task(self._watch())]
                await self._follow(tasks)
                await self._release_all()
                await self._leave()
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as failures:
            fatal = failures.subgroup(MembershipError)
            if fatal is not None:
                raise fatal.exceptions[0] from None
            raise
        finally:
            if self._asking is not None:
                self._asking.cancel()
            self._lose("it stopped")
            self._client.close()

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Take part in round after round."""
        backoff_s = MIN_JOIN_BACKOFF_S
        self._wanted.set()
        while True:
            await self._wanted.wait()
            if self._stopping.is_set():
                return
            self._wanted.clear()
            self._round = tasks.create_task(self._try_round(tasks))
            await asyncio.wait((self._round,))
            is_done = not self._round.cancelled() and self._round.result()
            self._round = None
            if is_done:
                backoff_s = MIN_JOIN_BACKOFF_S
                continue
            self._wanted.set()
            await wait_at_most(backoff_s, self._stopping.wait())
            backoff_s = min(2 * backoff_s, MAX_JOIN_BACKOFF_S)

    async def _try_round(self, tasks: asyncio.TaskGroup) -> bool:
        """Take part in a round; return whether it gave an assignment."""
        try:
            coordinator = await self._coordinator()
            connection = await self._bootstrap.connect((coordinator,), limit_s=ANSWER_LIMIT_S)
            try:
                return await self._take_part(connection, tasks)
            finally:
                connection.close()
        except (UpstreamError, NonRetriableError) as error:
            self._client.forget(self._coordinator_key)
            self._session.failed(str(error))
            return False

    async def _take_part(self, connection: BrokerConnection, tasks: asyncio.TaskGroup) -> bool:
        with misread_is_bad_response():
            outcome = await self._ask_assignment(connection)
        if outcome is None:
            return False
        assignment, is_another_round_wanted = outcome
        self._take(assignment, tasks)
        if is_another_round_wanted:
            self._wanted.set()
        return True

    async def _ask_assignment(self, connection: BrokerConnection) -> tuple[Assignment, bool] | None:
        """Return what a round gave, and whether another one is wanted; None: it gave nothing."""
        subscription = self._slots.subscription(self._announce())
        limit_s = self._session_timeout_s + ROUND_MARGIN_S
        before = self.fence
        request = join_request(before, self._session_timeout_s, subscription.encode())
        joined = await connection.ask(request, limit_s)
        if joined.error_code == MEMBER_ID_REQUIRED:
            self.fence = replace(self.fence, member_id=joined.member_id)
        if not self._check(joined.error_code, before.member_id):
            return None
        fence = self.fence = replace(
            before, member_id=joined.member_id, generation=joined.generation_id
        )
        self._beats_now.set()
        assignments: dict[str, bytes] = {}
        is_another_round_wanted = False
        if joined.leader == joined.member_id:
            said = {each.member_id: bytes(each.metadata) for each in joined.members}
            newest = self._slots.assignment
            assignments, is_another_round_wanted = sync_group_assignments(
                said, newest, fence.generation, self._placement
            )
        sent_s = time.monotonic()
        synced = await connection.ask(sync_request(fence, assignments), limit_s)
        if not self._check(synced.error_code, joined.member_id):
            return None
        if time.monotonic() - sent_s >= self._session_timeout_s:
            # This process stood still; what it got may be another's by now.
            self._session.failed("the answer to SyncGroup is older than the session")
            return None
        assignment = Assignment.decode(bytes(synced.assignment))
        self._session.extend(sent_s)
        return assignment, is_another_round_wanted

    def _take(self, assignment: Assignment, tasks: asyncio.TaskGroup) -> None:
        refusal = assignment.refused.get(self.fence.member_id)
        log_oddities(assignment, self._slots.assignment, self.fence.member_id)
        revoked, must_rejoin = self._slots.assign(
            assignment, self.name, is_refused=refusal is not None
        )
        refused = f"the tier refuses this machine: {refusal.reason}" if refusal else None
        self._session.set_problem(refused)
        self._on_assigned()
        if revoked:
            task = tasks.create_task(self._release(revoked))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)
        if must_rejoin:
            self._wanted.set()

    async def _release(self, slots: frozenset[int]) -> None:
        """Have slots released, in a limited time, before they are given to other members."""
        try:
            async with asyncio.timeout(RELEASE_LIMIT_S):
                await self._on_revoked(slots)
        except TimeoutError:
            text = "slots are given away before all was released"
            _log.warning(text, slots=len(slots), limit_s=RELEASE_LIMIT_S)
        except Exception:
            _log.exception("slots are given away, and were not released in order")
        self._slots.released(slots)
        self._wanted.set()

    async def _release_all(self) -> None:
        """Release all that is still owned, when what was begun is done."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=RELEASE_LIMIT_S)
        if rest := self._slots.revoke_all():
            await self._release(rest)

    async def _leave(self) -> None:
        self._session.ends_s = None
        before = self._forget_place()
        if before.member_id:
            with suppress(UpstreamError, NonRetriableError, TimeoutError):
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    await self._client.ask(leave_request(before), await self._coordinator())

    def _forget_place(self) -> GroupFence:
        """Join as a new member next; return as what it was known until now."""
        before = self.fence
        self.fence = replace(before, generation=NO_GENERATION, member_id=NO_MEMBER_ID)
        return before

    async def _beat(self) -> None:
        """Send heartbeats while there is a place in the group."""
        while True:
            newest = self._slots.assignment
            is_settled = newest is None or newest.is_settled
            interval_s = HEARTBEAT_INTERVAL_S if is_settled else UNSETTLED_INTERVAL_S
            await wait_at_most(interval_s, self._beats_now.wait())
            self._beats_now.clear()
            fence, sent_s = self.fence, time.monotonic()
            if not fence.member_id or fence.generation == NO_GENERATION:
                continue
            try:
                answer = await self._client.ask(heartbeat_request(fence), await self._coordinator())
                self._heard(answer.error_code, fence, sent_s)
            except (UpstreamError, NonRetriableError) as error:
                self._client.forget(self._coordinator_key)
                self._session.failed(str(error))
                self._interrupt()  # a round at a coordinator that is gone would wait for long
                await asyncio.sleep(BEAT_AGAIN_S)
                self._beats_now.set()

    def _heard(self, error_code: int, fence: GroupFence, sent_s: float) -> None:
        if fence.member_id != self.fence.member_id:
            return  # it was about a place that we had before
        meaning = action_for_error(error_code)
        is_in_round = self._round is not None
        if meaning is ErrorAction.REJOIN:
            # With a generation that is over, the coordinator did not begin the session anew.
            if error_code == REBALANCE_IN_PROGRESS:
                self._session.extend(sent_s)
            if not is_in_round and fence == self.fence:
                self._wanted.set()
        elif self._check(error_code, fence.member_id):
            self._session.extend(sent_s)
            if not is_in_round and self.refusal is None:
                self._session.set_problem(None)
        elif meaning is ErrorAction.UNKNOWN:
            self._interrupt()
            self._wanted.set()

    async def _watch(self) -> None:
        """Give up what we have when the session may be over by our own clock.

        While the coordinator is away for all, nobody can get slots: then the last map holds. Who
        stood still for as long as a session knows nothing of that.
        """
        session_s = self._session_timeout_s
        while True:
            ends_s, now_s = self._session.ends_s, time.monotonic()
            left_s = HEARTBEAT_INTERVAL_S if ends_s is None else ends_s - now_s
            if left_s > 0:
                self._hold(is_held=False)
                wait_s = min(left_s, HEARTBEAT_INTERVAL_S)
            elif await self._may_hold(self.fence.generation):
                self._hold(is_held=True)
                wait_s = HOLD_INTERVAL_S
            else:
                wait_s = self._lose_session()
            await asyncio.sleep(wait_s)
            if time.monotonic() - now_s > wait_s + session_s:
                self._lose_session()

    def _lose_session(self) -> float:
        """Give up what we have; return for how long there is nothing to watch."""
        ends_s = self._session.ends_s
        if ends_s is None or ends_s > time.monotonic():
            return 0.0
        self._lose(f"the coordinator was not heard for {self._session_timeout_s:g} s")
        self._wanted.set()
        self._interrupt()
        return HEARTBEAT_INTERVAL_S

    def _hold(self, *, is_held: bool) -> None:
        """Log that the last map holds without a session, or that this is over."""
        if is_held != self._is_holding:
            self._is_holding = is_held
            text = "the coordinator is not heard by any member: the last map of slots holds"
            if is_held:
                _log.warning(text, member=self.name)
            else:
                _log.info("the coordinator is heard again", member=self.name)

    def _check(self, error_code: int, member_id: str) -> bool:
        """Return whether this is no error; do what an error asks for at once.

        Raises MembershipError for one that stays, UpstreamError and NonRetriableError for others.
        """
        meaning = action_for_error(error_code)
        if meaning is ErrorAction.FINE:
            return True
        if meaning is ErrorAction.REJOIN:
            return False
        text = explain_refusal(error_code, self.fence, self._session_timeout_s)
        if meaning is ErrorAction.UNKNOWN:
            if member_id == self.fence.member_id:
                self._forget_place()
                self._lose(text)
            return False
        if meaning is ErrorAction.NEVER:
            self._lose(text)
            self._session.set_problem(text)
            raise MembershipError(text)
        if meaning is ErrorAction.MOVED:
            raise UpstreamError(NOT_READY, f"the coordinator is not ready: {text}")
        raise NonRetriableError(text, error_code)

    async def _coordinator(self) -> tuple[str, int]:
        return await self._client.coordinator(
            self._coordinator_key, lambda code: self._check(code, self.fence.member_id)
        )

    def _lose(self, reason: str) -> None:
        """Own nothing any more, and say so, if we had a place at all."""
        for task in self._releases:
            task.cancel()  # the slots are lost
        self._is_holding = False
        had_place = self._slots.owned or self._session.ends_s is not None
        self._session.ends_s = None
        self._slots.lost()
        if had_place:
            _log.warning("the place in the tier is lost", machine=self.name, reason=reason)
            self._on_lost()

    def _interrupt(self) -> None:
        if self._round is not None:
            self._round.cancel()

    def _ask_now(self) -> None:
        self._asking = None
        self._asked_s = time.monotonic()
        self._wanted.set()


def log_oddities(assignment: Assignment, before: Assignment | None, member_id: str) -> None:
    """Log what is odd about the other members, and was not `before`: rules, clocks, refusals."""
    digests = assignment.rules_digests
    if len(digests) > 1 and (before is None or digests != before.rules_digests):
        _log.warning("machines of the tier have different rules", machines_by_digest=digests)
    was_apart = before is not None and before.clocks_apart_s > CLOCKS_APART_S
    if assignment.clocks_apart_s > CLOCKS_APART_S and not was_apart:
        clocks = {name: each.clock_s for name, each in assignment.members.items()}
        _log.warning("clocks of the tier are far apart", clock_s_by_machine=clocks)
    for key, refusal in assignment.refused.items():
        if key != member_id and (before is None or before.refused.get(key) != refusal):
            text = "the tier refuses a machine"
            _log.warning(text, machine=refusal.name, reason=refusal.reason)


async def find_group_sharing_topic(
    client: KafkaClient, group_id: str, state_topic: str, brokers: Iterable[Address]
) -> str | None:
    """Return another tier's group whose members keep their state in this topic.

    None: these brokers know of no such group, in ANSWER_LIMIT_S, or of members of this tier: they
    were there before.
    """
    members: dict[str, list[Any]] = {}

    async def look(broker: Address) -> None:
        with suppress(UpstreamError):
            listed = (await client.ask(ListGroupsRequest[LIST_VERSION](), broker)).groups
            tiers = [each.group_id for each in listed if each.protocol_type == PROTOCOL_TYPE]
            describe = DescribeGroupsRequest[DESCRIBE_VERSION](groups=tiers)
            described = (await client.ask(describe, broker)).groups
            members.update((each.group_id, each.members) for each in described)

    await wait_at_most(ANSWER_LIMIT_S, asyncio.gather(*map(look, brokers)))
    if members.pop(group_id, None):
        return None
    for group, each in members.items():
        if any(_state_topic_of(member.member_metadata) == state_topic for member in each):
            return group
    return None


def _state_topic_of(metadata: bytes) -> str | None:
    with suppress(UserDataError):
        return Subscription.decode(metadata).state_topic
    return None
