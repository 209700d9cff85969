"""Membership: who is in the group, how all come to agree on it, and how the dead are found.

Each worker has a view (`members.py`) that it merges with what it hears. Three things go on:

    spreading    whoever learns something new tells its successor on the ring and `CHANCE_TARGETS` others by chance.
                 The successors alone reach everybody if nothing is lost; chance makes it fast, and sure. About
                 3 messages for each worker and change.
    comparing    pings and their answers carry a digest of the view. Who sees another one than its own sends its view's
                 numbers, and both send what the other lacks. So views converge whatever was lost.
    watching     each worker pings its `NEIGHBOURS` successors in every interval (`watching.py`). One that stays silent
                 is asked for through `HELPERS` others, then declared lost, and the news is spread.

Rules
- FORWARD: what is gone stays gone; what a gone worker says is not believed, and it is told.
- FAIR: a worker is declared lost if it was silent for the patience while its watcher ran, and to others too; or if its
  address refuses connections.
- EXPELLED: a worker that hears of its own loss says so once, and is silent from then on.
- FREE: nobody waits for anybody; no message has to arrive.
- BOUNDED: what is kept is bounded by the members that are there (and a constant).

In a fixed group, where everybody is there from the start, it is the failure detector and nothing else.

A partition that lasts longer than the patience makes two groups, each of which takes the other for dead; they do not
look for each other afterwards. Which of them is to go on is not decided here.

Pure: events in, effects out. Time comes with the ticks, chance is handed in. It sends nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from farcall.protocol.ids import Worker
from farcall.protocol.members import Learned, Members
from farcall.protocol.membership_messages import (
    Ack,
    Alive,
    Compare,
    Effect,
    Event,
    Expelled,
    LeaveWanted,
    Member,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Message,
    MessageReceived,
    News,
    PeerHeard,
    PeerUnreachable,
    Ping,
    Probe,
    SendMessage,
    Started,
    Ticked,
    Wanted,
)
from farcall.protocol.watching import Watching

INTERVAL: Final = 1.0
PATIENCE: Final = 8.0
"""With these a frozen worker is lost for all within 10 s, and one that is silent for 5 s is not."""

NEIGHBOURS: Final = 3
HELPERS: Final = 2
CHANCE_TARGETS: Final = 2
MUCH: Final = 32
"""Who learns so much at once was behind, and has nothing to tell: others know it all."""
UNQUIET_ROUNDS: Final = 3
"""So many ticks is comparing put off while news keeps coming in."""


class Membership:
    """The group as the worker `me` knows it. `pick(n)` is a number below n, by chance. It is ticked every interval."""

    def __init__(
        self, me: Member, pick: Callable[[int], int], *, interval: float = INTERVAL, patience: float = PATIENCE
    ) -> None:
        """Raises `UsageError` if interval and patience do not go together."""
        self.me = me
        self.members = Members()
        self.members.learn(News((me,)))  # others may say something before this worker has even started
        self.watching = Watching(interval, patience)
        self.is_out = False
        """Whether this worker has left or was expelled."""
        self._pick = pick
        self._said_good_bye = False
        self._round = 0
        self._changed = 0  # the round in which the view changed last
        self._compared = -UNQUIET_ROUNDS  # the round in which views were last compared
        self._asked: dict[Worker, tuple[int, set[Worker]]] = {}  # whom we ping for others: since when, for whom
        self._handlers: dict[type[Any], Callable[..., list[Effect]]] = {
            Started: self.started,
            MessageReceived: self.message_received,
            Ticked: self.ticked,
            PeerHeard: self.peer_heard,
            PeerUnreachable: self.peer_unreachable,
            LeaveWanted: self.leave_wanted,
        }
        self._message_handlers: dict[type[Any], Callable[[Worker, Any], list[Effect]]] = {
            Ping: self._pinged,
            Ack: self._answered,
            News: self._news_came,
            Compare: self._compare,
            Wanted: self._wanted,
            Probe: self._probe,
            Alive: self._found_alive,
        }

    def handle(self, event: Event) -> list[Effect]:
        """Takes an event, gives what is to be done: the method of the event's name. Raises as that does."""
        return self._handlers[type(event)](*event)

    # What happens here

    def started(self, members: tuple[Member, ...], announce: bool) -> list[Effect]:
        """See `Started`; once, and first."""
        learned = self.members.learn(News((*members, self.me)))
        if self.me.number not in self.members.here:
            return self._expelled()  # somebody has taken the name again before we even began
        self._follow()
        effects = self._told(learned)
        if announce:
            effects += self._spread(News((self.me,)), ())
            # The store knows neither all who are there nor who is gone: a member does.
            summary = self.members.summary()
            effects += [SendMessage(to, summary) for to in self.members.successors(self.me.number, 1)]
        return effects

    def ticked(self, now: float) -> list[Effect]:
        """See `Ticked`: pings the neighbours, and declares those lost that have been silent for too long."""
        if self.is_out:
            return []
        self._round += 1
        watching, members = self.watching, self.members
        watching.advance(now)
        dead = watching.dead(alone=len(members.here) <= 2)
        effects = self._learn(News(lost=tuple((number, number) for number in dead)), ()) if dead else []
        for suspect in watching.suspects():
            for helper in members.sample(HELPERS, self._pick, (self.me.number, suspect)):
                effects.append(SendMessage(helper, Probe(suspect)))
        ping = Ping(members.digest)
        effects += [SendMessage(neighbour, ping) for neighbour in watching.watched]
        if self._asked:
            self._asked = {target: asked for target, asked in self._asked.items() if asked[0] + 2 > self._round}
        return effects

    def peer_heard(self, worker: Worker) -> list[Effect]:
        """See `PeerHeard`."""
        self.watching.heard(worker)
        return self._tell_askers(worker) if worker in self._asked else []

    def peer_unreachable(self, worker: Worker) -> list[Effect]:
        """See `PeerUnreachable`: it is lost at once."""
        if self.is_out or worker not in self.members.here:
            return []
        return self._learn(News(lost=((worker, worker),)), ())

    def leave_wanted(self) -> list[Effect]:
        """See `LeaveWanted`. From here on this worker only says, to whoever asks, that it has left."""
        if self.is_out:
            return []
        self.is_out = self._said_good_bye = True
        self._asked.clear()
        me = self.me.number
        # Those who watch this worker should know before they see its connections closed.
        targets = self._targets(()) + self.members.predecessors(me, NEIGHBOURS)
        return [SendMessage(target, self._good_bye()) for target in dict.fromkeys(targets)]

    def _good_bye(self) -> News:
        return News(left=((self.me.number, self.me.number),))

    # Messages

    def message_received(self, sender: Worker, message: Message) -> list[Effect]:
        """See `MessageReceived`. Raises `ProtocolError`, changing nothing, if it names numbers that cannot be."""
        if self.is_out:
            asks = self._said_good_bye and isinstance(message, Ping | Compare | Probe)
            return [SendMessage(sender, self._good_bye())] if asks else []
        if sender not in self.members.here and sender in self.members.gone:
            # Not if it says the same of us: we would go on telling each other for ever.
            return [] if self._is_about_me(message) else [SendMessage(sender, News(lost=((sender, sender),)))]
        self.watching.heard(sender)
        effects = self._message_handlers[type(message)](sender, message)
        return effects + self._tell_askers(sender) if sender in self._asked else effects

    def _pinged(self, sender: Worker, ping: Ping) -> list[Effect]:
        return [SendMessage(sender, Ack(self.members.digest))]

    def _answered(self, sender: Worker, ack: Ack) -> list[Effect]:
        if ack.digest == self.members.digest:
            return []
        waited = self._round - self._compared
        # While news is on its way all views differ for a moment, and comparing them would be for nothing.
        quiet = self._changed < self._round - 1
        if waited < (1 if quiet else UNQUIET_ROUNDS):
            return []
        self._compared = self._round
        return [SendMessage(sender, self.members.summary())]

    def _news_came(self, sender: Worker, news: News) -> list[Effect]:
        if not self.members.is_new(news):
            return []  # most news comes several times
        if self._is_about_me(news):
            return self._expelled()
        return self._learn(news, (sender,))

    def _compare(self, sender: Worker, theirs: Compare) -> list[Effect]:
        effects: list[Effect] = []
        news, wanted = self.members.difference(theirs)
        if news != News():
            effects.append(SendMessage(sender, news))
        if wanted.numbers:
            effects.append(SendMessage(sender, wanted))
        return effects

    def _wanted(self, sender: Worker, wanted: Wanted) -> list[Effect]:
        news = self.members.about(wanted.numbers)
        return [SendMessage(sender, news)] if news != News() else []

    def _probe(self, sender: Worker, probe: Probe) -> list[Effect]:
        target = probe.target
        if target not in self.members.here:
            # Unknown, or gone; the latter the sender should know.
            return self._wanted(sender, Wanted(((target, target),)))
        if target == self.me.number:
            return [SendMessage(sender, Ack(self.members.digest))]
        self._asked.setdefault(target, (self._round, set()))[1].add(sender)
        return [SendMessage(target, Ping(self.members.digest))]

    def _found_alive(self, sender: Worker, alive: Alive) -> list[Effect]:
        self.watching.heard(alive.target)
        return []

    def _tell_askers(self, target: Worker) -> list[Effect]:
        _, askers = self._asked.pop(target)
        return [SendMessage(asker, Alive(target)) for asker in askers if asker in self.members.here]

    # What follows

    def _learn(self, news: News, without: tuple[Worker, ...]) -> list[Effect]:
        """Takes news, tells the program, and passes on what was new."""
        learned = self.members.learn(news)
        if not learned:
            return []
        if self.me.number not in self.members.here:
            return self._expelled()  # another one has our name
        self._changed = self._round
        self._follow()
        for member, _ in learned.removed:
            self._asked.pop(member.number, None)
        effects = self._told(learned)
        if learned.size() < MUCH:
            # Whom it is about knows it.
            effects += self._spread(learned.news(), (*without, *[member.number for member in learned.joined]))
        return effects

    def _told(self, learned: Learned) -> list[Effect]:
        """What the program is to know: first who is gone, as a name may have changed hands."""
        joined = {member.number: member for member in learned.joined if member.number != self.me.number}
        effects: list[Effect] = []
        for member, left in learned.removed:
            if joined.pop(member.number, None) is None:  # else it came and went in the same news
                effects.append(MemberLeft(member) if left else MemberLost(member))
        return effects + [MemberJoined(member) for member in joined.values()]

    def _spread(self, news: News, without: tuple[Worker, ...]) -> list[Effect]:
        return [SendMessage(target, news) for target in self._targets(without)]

    def _targets(self, without: tuple[Worker, ...]) -> list[Worker]:
        me = self.me.number
        successors = self.members.successors(me, 1 + len(without))
        targets = [number for number in successors if number not in without][:1]
        return targets + self.members.sample(CHANCE_TARGETS, self._pick, (me, *without, *targets))

    def _follow(self) -> None:
        self.watching.follow(self.members.successors(self.me.number, NEIGHBOURS))

    def _is_about_me(self, message: Message) -> bool:
        """Whether it says that this worker is gone."""
        me = self.me.number
        return isinstance(message, News) and any(first <= me <= last for first, last in (*message.left, *message.lost))

    def _expelled(self) -> list[Effect]:
        self.is_out = True
        self._asked.clear()
        return [Expelled()]
