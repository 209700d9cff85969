"""Membership protocols with one bug each, to know that the checks bite. Each names the rule that it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farcall.protocol.ids import Worker
from farcall.protocol.members import Learned, Members
from farcall.protocol.membership import Membership
from farcall.protocol.membership_messages import (
    Ack,
    Alive,
    Effect,
    Member,
    MemberJoined,
    Message,
    News,
    Probe,
    SendMessage,
)
from farcall.protocol.ranges import Ranges
from farcall.protocol.watching import Watching


def with_parts(members: type[Members] = Members, watching: type[Watching] = Watching) -> Callable[..., Membership]:
    """The protocol with another view or another watch."""

    def make(me: Member, pick: Callable[[int], int], *, interval: float, patience: float) -> Membership:
        membership = Membership(me, pick, interval=interval, patience=patience)
        membership.members, membership.watching = members(), watching(interval, patience)
        return membership

    return make


class _Forgetful(Ranges):
    def add(self, first: int, last: int) -> None:
        pass


class NoTombstones(Members):
    """Those who are gone are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = _Forgetful()


class NamesNotTakenOver(Members):
    """A restarted worker leaves the one of its name in place."""

    def _add(self, member: Member, learned: Learned) -> None:
        self.names.pop(member.name, None)
        super()._add(member, learned)


class NoForgiveness(Watching):
    """Time that the watcher missed is counted as the others' silence."""

    def advance(self, now: float) -> bool:
        self._clock += 0.0 if self._now is None else max(0.0, now - self._now - self.interval)
        return super().advance(now)


class BlamesAtOnce(Watching):
    """A watcher that comes back declares others dead before it has read their answers."""

    def advance(self, now: float) -> bool:
        is_turn = super().advance(now)
        self._just_back = False
        return is_turn


class NeverLonely(Watching):
    """A watcher that hears nobody takes all others for dead, not itself for cut off."""

    def _hears_nobody(self) -> bool:
        return False


class OnlyNeighbours(Watching):
    """A worker looks no further than its neighbours when none of them answers: others are lost three at a time."""

    def look_further(self) -> bool:
        return False


class WidensSlowly(Watching):
    """It looks further by one at each turn, which is not fast enough for many."""

    def look_further(self) -> bool:
        before = self.span
        return super().look_further() and (self.span <= before or self._one_more(before))

    def _one_more(self, before: int) -> bool:
        self.span = before + 1
        return True


class CountsFromTheLastAnswer(Watching):
    """Silence begins with the last answer, though nobody has asked since: almost an interval too early."""

    def to_ping(self) -> list[Worker]:
        pings = super().to_ping()
        for neighbour in self.watched.values():
            if neighbour.unanswered is not None:
                neighbour.unanswered = min(neighbour.unanswered, neighbour.heard)
        return pings


class HalfAnIntervalEarly(Watching):
    """Rounds are counted, and half an interval is given away for ticks that come early."""

    def dead(self) -> list[Worker]:
        self._clock += 0.75 * self.interval
        dead = super().dead()
        self._clock -= 0.75 * self.interval
        return dead


class NotAskedAnew(Watching):
    """Who hears others again does not ask them before it judges those that it does not hear yet."""

    def heard(self, worker: Worker) -> None:
        asked = {number: (each.asked_others, each.questions) for number, each in self.watched.items()}
        super().heard(worker)
        for number, neighbour in self.watched.items():
            if number != worker:
                neighbour.asked_others, neighbour.questions = asked[number]


class IsolatedAtTheSameTime(Watching):
    """Who hears nobody judges the others as soon as they judge it."""

    def dead(self) -> list[Worker]:
        if self._just_back or not self._hears_nobody():
            return super().dead()
        since = self._clock - self.patience - 0.25 * self.interval
        return [n for n, each in self.watched.items() if each.unanswered is not None and each.unanswered <= since]


class Impatient(Watching):
    """One that is busy for five seconds is taken for dead."""

    def __init__(self, interval: float, patience: float) -> None:
        super().__init__(interval, patience / 2)


class NoComparing(Membership):
    """Views that differ are not compared, so what was lost on the way is never made up for."""

    def _answered(self, sender: Worker, ack: Ack) -> list[Effect]:
        return []


class NotPassedOn(Membership):
    """News goes no further than the first who hear it. (Comparing brings it round in the end, but slowly.)"""

    def _learn(self, news: News, without: tuple[Worker, ...]) -> list[Effect]:
        return [effect for effect in super()._learn(news, without) if not _is_news(effect)]


class PassedOnAlways(Membership):
    """What is known already is passed on as well: it never ends."""

    def _news_came(self, sender: Worker, news: News) -> list[Effect]:
        return super()._news_came(sender, news) or self._spread(news, (sender,))[:1]


class NoHelpers(Membership):
    """Nobody else is asked about a silent worker, so one bad link kills."""

    def ticked(self, now: float) -> list[Effect]:
        return [effect for effect in super().ticked(now) if not _carries(effect, Probe)]


class TwoHelpers(Membership):
    """Two others by chance are asked about a silent worker, not all: a partial cut kills those whom most hear."""

    def _ask_others(self, silent: list[Worker]) -> list[Effect]:
        return super()._ask_others(silent)[-2:]


class SpreadsToTheSilent(Membership):
    """News is wasted on those who are lost as well, but not known to be yet."""

    def _targets(self, without: tuple[Worker, ...]) -> list[Worker]:
        successors = [n for n in self.members.successors(self.me.number, 1 + len(without)) if n not in without][:1]
        return successors + self.members.sample(2, self._pick, (self.me.number, *without, *successors))


class ManyLostNotPassedOn(Membership):
    """Who hears of many losses at once takes them for old."""

    def _learn(self, news: News, without: tuple[Worker, ...]) -> list[Effect]:
        effects = super()._learn(news, without)
        return [each for each in effects if not _is_news(each)] if len(news.lost) >= 8 else effects


class HelpersSayNothing(Membership):
    """Who is asked about a silent worker does not tell that it answered."""

    def message_received(self, sender: Worker, message: Message) -> list[Effect]:
        return [effect for effect in super().message_received(sender, message) if not _carries(effect, Alive)]


class GoneOnesNotTold(Membership):
    """A worker that was taken for dead, and is not, is never told."""

    def message_received(self, sender: Worker, message: Message) -> list[Effect]:
        return [] if sender in self.members.gone else super().message_received(sender, message)


class ExpulsionUnheard(Membership):
    """A worker hears that it was taken for dead, and goes on."""

    def _expelled(self) -> list[Effect]:
        return []


class RefusedIsNoLoss(Membership):
    """A closed port is waited for like silence."""

    def peer_unreachable(self, worker: Worker) -> list[Effect]:
        return []


class JoinsToldTwice(Membership):
    """The program hears of a member again with every piece of news about it."""

    def _news_came(self, sender: Worker, news: News) -> list[Effect]:
        again: list[Effect] = [MemberJoined(member) for member in news.members if member.number in self.members.here]
        return super()._news_came(sender, news) + again


class LeavesSilently(Membership):
    """A worker leaves without a word to anybody."""

    def leave_wanted(self) -> list[Effect]:
        super().leave_wanted()
        return []

    def message_received(self, sender: Worker, message: Message) -> list[Effect]:
        return [] if self.is_out else super().message_received(sender, message)


def _is_news(effect: Effect) -> bool:
    return _carries(effect, News)


def _carries(effect: Effect, kind: type[Any]) -> bool:
    return isinstance(effect, SendMessage) and isinstance(effect.message, kind)


WATCHES: list[type[Watching]] = [
    NoForgiveness, BlamesAtOnce, NeverLonely, Impatient, OnlyNeighbours, WidensSlowly, CountsFromTheLastAnswer,
    HalfAnIntervalEarly, IsolatedAtTheSameTime, NotAskedAnew,
]  # fmt: skip

PLANTED: list[tuple[str, Callable[..., Membership]]] = [
    *((part.__name__, with_parts(members=part)) for part in (NoTombstones, NamesNotTakenOver)),
    *((part.__name__, with_parts(watching=part)) for part in WATCHES),
    *(
        (whole.__name__, whole)
        for whole in (
            NoComparing, NotPassedOn, PassedOnAlways, NoHelpers, TwoHelpers, HelpersSayNothing, SpreadsToTheSilent,
            ManyLostNotPassedOn, GoneOnesNotTold, ExpulsionUnheard,
            RefusedIsNoLoss, JoinsToldTwice, LeavesSilently,
        )
    ),
]  # fmt: skip
