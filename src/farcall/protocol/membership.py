"""The membership protocol: how all workers come to agree on who is in the group, and how lost workers are found.

Each worker has a view of the group (`members.py`), which it merges with the news that it receives. There are three
activities:

    spreading    A worker that learns something new sends it to its successor on the ring and to `CHANCE_TARGETS` random
                 members. The successors alone reach all members if no message is lost; the random members make it
                 faster and more reliable. This takes about 3 messages for each worker and change.
    comparing    Pings and their answers have a digest of the view. A worker that receives a digest other than its own
                 sends the numbers in its view, and both workers send what the other lacks. So views become equal even
                 if messages were lost.
    watching     Each worker pings its `NEIGHBOURS` successors in every interval, one after the other, and more of them
                 while none answers (`watching.py`). If a worker stays silent, its watcher asks all members that it
                 hears. If none of them hears the silent worker, it is declared lost, and the news is spread.

Rules
- FORWARD: a gone worker stays gone. Its messages are not processed; it is told that it is gone.
- PATIENT: no worker is declared lost that was silent for less than the timeout (the option `heartbeat_patience`),
  counted while its watcher ran. There is one exception: its address refuses connections, so its process has ended.
- HEARD: no worker is declared lost that is heard by a member that the declaring worker hears. A member *hears* another
  one that answers its pings.
- PROMPT: a worker that stays silent is lost for all members within the timeout and two intervals, however many are
  lost with it. If its watchers are lost while they wait, the time counts from the loss of the last one.
- EXPELLED: a worker that learns of its own loss returns `Expelled` once, and sends nothing from then on.
- FREE: no worker waits for another one, and no single message has to arrive.
- BOUNDED: the memory is bounded by the number of members (and a constant).

In a fixed group, where all workers are members from the start, the protocol is only a failure detector.

If some connections are cut for longer than the timeout:

    some links are cut       Both ends of a cut link remain members if one other member hears both of them; also if only
                             one direction of a link is cut. If there is no such member, the two ends may declare each
                             other lost.
    the group is cut in two  Each part declares the other one lost, and continues as a group. The parts do not look for
                             each other afterwards. The protocol does not decide which part should continue.
    one worker is cut off    The same, but the others decide first. If the cut ends before the single worker has decided
                             too, it has lost nobody, and learns that it is lost. Otherwise it is a group of one.

A member that lies can keep a lost worker in the group, or have a living one declared lost. Only messages of members are
processed.

Pure: events in, effects out. The time comes with the ticks, and random numbers come from a function that is passed in.
Nothing is sent here.
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
from farcall.protocol.ranges import ranges_of
from farcall.protocol.watching import NEIGHBOURS, TURNS, Watching

INTERVAL: Final = 1.0
"""The default of `interval`, in seconds."""
PATIENCE: Final = 8.0
"""The default timeout, in seconds. With these values a stopped worker is lost for all within 10 s, and a worker that is
silent for 8 s is not lost."""

STRANGERS: Final = 64
"""How many members that were not heard recently are asked about a silent worker, at most, chosen at random. All members
that were heard are asked as well. So in a group of this size all members are asked."""
CHANCE_TARGETS: Final = 2
"""How many random members news is sent to, besides the next member on the ring."""
MUCH: Final = 32
"""A worker that learns of this many members at once does not spread that: it was behind, and the others know them."""
UNQUIET_ROUNDS: Final = 3
"""How many intervals must be between two comparisons of views while news keeps arriving."""


class Membership:
    """The membership protocol of one worker: its view of the group, and what it sends to keep that view up to date.

    The view is the set of workers that this worker believes to be members or gone. Each public method processes one
    event, and returns a list of effects: messages to send, and changes of the group. The caller must carry them out in
    the order of the list. It is empty if there is nothing to do. Nothing is sent here, and no clock is read.

    At first this worker is the only member in the view. The caller must call `started` once. Messages may be processed
    before that.

    Args:
        me: This worker.
        pick: Returns a random number from 0 to its argument minus one.
        interval: Seconds in which each watched neighbour gets one heartbeat.
        patience: The timeout: the least seconds of silence before a worker is declared lost. At least three
            intervals.

    Raises:
        UsageError: `interval` is not positive, or the timeout is shorter than three intervals.
    """

    def __init__(
        self, me: Member, pick: Callable[[int], int], *, interval: float = INTERVAL, patience: float = PATIENCE
    ) -> None:
        self.me = me
        self.members = Members()
        self.members.learn(News((me,)))  # others may say something before this worker has even started
        self.watching = Watching(interval, patience)
        self.is_out = False
        """Whether this worker has left or was expelled."""
        self._pick = pick
        self._said_good_bye = False
        self._round = 0  # counts intervals
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
        """Processes an event by the method for its type, such as `ticked` for a `Ticked`, and returns the effects.

        Raises:
            ProtocolError: A `MessageReceived` has a message with numbers that no worker can have.
            KeyError: The event is of an unknown type.
        """
        return self._handlers[type(event)](*event)

    # What happens here

    def started(self, members: tuple[Member, ...], announce: bool) -> list[Effect]:
        """Adds the members that are known when this worker starts. Must be called once.

        Args:
            members: The known members, with or without this worker; may be empty.
            announce: True if the other members do not know this worker yet, as in an open group.

        Returns:
            `MemberJoined` for each other member. If `announce` is True, also messages that make this worker known, and
            a `Compare` to one member, which answers with the news that this worker lacks. Only `Expelled` if a newer
            worker has this worker's name.
        """
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
        """Does what is due at a time: pings neighbours, asks others about silent ones, and declares workers lost.

        Args:
            now: The current time of the monotonic clock. It should be the time that `next_tick` returned, but may be
                earlier or later. If it is much later, nobody is declared lost now, because answers may be unread.

        Returns:
            The messages to send, and `MemberLost` for each worker that is lost now. An empty list if nothing is due, or
            after this worker has left or was expelled.
        """
        if self.is_out:
            return []
        watching = self.watching
        is_turn = watching.advance(now)
        dead = watching.dead()
        effects = self._learn(News(lost=ranges_of(dead)), ()) if dead else []
        if not is_turn:
            return effects
        self._round = watching.turn // TURNS
        if watching.look_further():
            self._follow()
        effects += self._ask_others(watching.to_ask_about())
        ping = Ping(self.members.digest)
        effects += [SendMessage(neighbour, ping) for neighbour in watching.to_ping()]
        if self._asked:
            self._asked = {target: asked for target, asked in self._asked.items() if asked[0] + 2 > self._round}
        return effects

    def next_tick(self) -> float:
        """Returns when to call `ticked` next, as a time of the monotonic clock.

        The caller must call this after each `ticked`. A `ticked` well after the returned time counts as late.
        """
        return self.watching.next_tick()

    def _ask_others(self, silent: list[Worker]) -> list[Effect]:
        """Returns `Probe` messages, which ask other members whether the workers in `silent` are alive.

        Asks all members that were heard lately, and at most `STRANGERS` random others. Returns an empty list if
        `silent` is empty, or there is nobody to ask.
        """
        if not silent:
            return []
        without = {self.me.number, *silent}
        heard = [each for each in self.watching.heard_of_late() if each in self.members.here and each not in without]
        strangers = self.members.sample(STRANGERS, self._pick, (*without, *heard))
        question = Probe(tuple(silent))
        return [SendMessage(helper, question) for helper in (*heard, *strangers)]

    def peer_heard(self, worker: Worker) -> list[Effect]:
        """Notes that something has arrived from a worker, which shows that it is alive.

        Args:
            worker: The worker. It need not be a member.

        Returns:
            `Alive` messages to the members that have asked about it; an empty list if none have.
        """
        self.watching.heard(worker)
        return self._tell_askers(worker) if worker in self._asked else []

    def peer_unreachable(self, worker: Worker) -> list[Effect]:
        """Declares a worker lost at once, because its process has ended.

        Args:
            worker: The worker.

        Returns:
            `MemberLost`, and messages that spread the news. An empty list if the worker is not a member, or this worker
            has left or was expelled.
        """
        if self.is_out or worker not in self.members.here:
            return []
        return self._learn(News(lost=((worker, worker),)), ())

    def leave_wanted(self) -> list[Effect]:
        """Leaves the group.

        From now on this worker answers only pings and questions, and each answer says that it has left.

        Returns:
            Messages that tell other members. An empty list if this worker has left before or was expelled.
        """
        if self.is_out:
            return []
        self.is_out = self._said_good_bye = True
        self._asked.clear()
        me = self.me.number
        # Those who watch this worker should know before they see its connections closed.
        targets = self._targets(()) + self.members.predecessors(me, NEIGHBOURS)
        return [SendMessage(target, self._good_bye()) for target in dict.fromkeys(targets)]

    def _good_bye(self) -> News:
        """Returns the news that this worker has left."""
        return News(left=((self.me.number, self.me.number),))

    # Messages

    def message_received(self, sender: Worker, message: Message) -> list[Effect]:
        """Processes a message of another worker. It may be late or a duplicate.

        A message of a worker that is gone is not processed; the answer tells that worker that it is lost. After this
        worker has left, a message that asks for an answer is answered with the news that this worker has left. After
        this worker was expelled, all messages are ignored.

        Args:
            sender: The number of the worker that sent the message. It need not be a member.
            message: The message, as `decode` returns it.

        Returns:
            The messages to send, and the changes of the group; often an empty list. Only `Expelled` if the message says
            that this worker is gone, or that a newer worker has its name.

        Raises:
            ProtocolError: The message has numbers that no worker can have. `decode` refuses such messages before.
        """
        if self.is_out:
            asks = self._said_good_bye and isinstance(message, Ping | Compare | Probe)
            return [SendMessage(sender, self._good_bye())] if asks else []
        if sender not in self.members.here and sender in self.members.gone:
            # Not if it says the same of us: the two workers would send this to each other for ever.
            return [] if self._is_about_me(message) else [SendMessage(sender, News(lost=((sender, sender),)))]
        self.watching.heard(sender)
        effects = self._message_handlers[type(message)](sender, message)
        return effects + self._tell_askers(sender) if sender in self._asked else effects

    def _pinged(self, sender: Worker, ping: Ping) -> list[Effect]:
        """Returns the answer to a heartbeat: an `Ack` with the digest of this worker's view."""
        return [SendMessage(sender, Ack(self.members.digest))]

    def _answered(self, sender: Worker, ack: Ack) -> list[Effect]:
        """Processes `ack`, the answer of `sender` to a heartbeat.

        If the sender's view differs from this worker's view, returns a `Compare` to the sender: a summary of this
        worker's view. Returns an empty list if the views are equal, or if this worker has sent a `Compare` lately.
        """
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
        """Adds news of another worker to the view.

        Returns the changes of the group and messages that spread what was new. Returns an empty list if all of it is
        known, and only `Expelled` if it says that this worker is gone or that a newer worker has its name.
        """
        if not self.members.is_new(news):
            return []  # most news comes several times
        if self._is_about_me(news):
            return self._expelled()
        return self._learn(news, (sender,))

    def _compare(self, sender: Worker, theirs: Compare) -> list[Effect]:
        """Compares this worker's view with `theirs`, a summary of the sender's view.

        Returns messages to the sender: the news that the sender lacks, and a request for the news that this worker
        lacks. Returns an empty list if the views are equal.
        """
        effects: list[Effect] = []
        news, wanted = self.members.difference(theirs)
        if news != News():
            effects.append(SendMessage(sender, news))
        if wanted.numbers:
            effects.append(SendMessage(sender, wanted))
        return effects

    def _wanted(self, sender: Worker, wanted: Wanted) -> list[Effect]:
        """Answers a worker that has asked about workers by their numbers.

        Returns the effect that sends it all that this worker knows of them; an empty list if it knows none of them.
        """
        news = self.members.about(wanted.numbers)
        return [SendMessage(sender, news)] if news != News() else []

    def _probe(self, sender: Worker, probe: Probe) -> list[Effect]:
        """Answers a worker that asks whether the workers in `probe.targets` are alive.

        Returns a `Ping` to each target that is another member. When such a target answers later, `_tell_askers` tells
        the sender. For targets that are gone, also returns news to the sender. If this worker is a target, also returns
        an `Ack` to the sender. Ignores unknown targets, so the list may be empty.
        """
        targets = dict.fromkeys(probe.targets)
        # Those that are not here are unknown, or gone; the latter the sender should know.
        effects = self._wanted(
            sender, Wanted(ranges_of(target for target in targets if target not in self.members.here))
        )
        for target in targets:
            if target not in self.members.here:
                continue
            if target == self.me.number:
                effects.append(SendMessage(sender, Ack(self.members.digest)))
            else:
                _, askers = self._asked.get(target, (0, set[Worker]()))
                self._asked[target] = (self._round, askers | {sender})
                effects.append(SendMessage(target, Ping(self.members.digest)))
        return effects

    def _found_alive(self, sender: Worker, alive: Alive) -> list[Effect]:
        """Notes that the sender has heard the silent worker `alive.target`. Returns an empty list."""
        self.watching.vouched_for(alive.target)
        return []

    def _tell_askers(self, target: Worker) -> list[Effect]:
        """Returns `Alive` messages to the members that have asked about `target`, and forgets that they have.

        Raises `KeyError` if nobody has asked about it.
        """
        _, askers = self._asked.pop(target)
        return [SendMessage(asker, Alive(target)) for asker in askers if asker in self.members.here]

    # What follows

    def _learn(self, news: News, without: tuple[Worker, ...]) -> list[Effect]:
        """Adds news to the view. Returns the changes of the group, and messages that spread what was new.

        Workers in `without` get no message. If `MUCH` or more workers have joined, nobody gets one. Returns an empty
        list if nothing was new. Returns only `Expelled` if a newer worker has this worker's name.
        """
        learned = self.members.learn(news)
        if not learned:
            return []
        if self.me.number not in self.members.here:
            return self._expelled()  # another one has our name
        self._changed = self._round
        self._follow()
        for member, _ in learned.removed:
            self._asked.pop(member.number, None)
            self.watching.forget(member.number)
        effects = self._told(learned)
        if len(learned.joined) < MUCH:
            # Whom it is about knows it.
            effects += self._spread(learned.news(), (*without, *[member.number for member in learned.joined]))
        return effects

    def _told(self, learned: Learned) -> list[Effect]:
        """Returns `MemberLeft`, `MemberLost` and `MemberJoined` for what was learned. The list may be empty.

        Workers that are gone come first, because a new member may have the same name.
        """
        joined = {member.number: member for member in learned.joined if member.number != self.me.number}
        effects: list[Effect] = []
        for member, left in learned.removed:
            if joined.pop(member.number, None) is None:  # else it came and went in the same news
                effects.append(MemberLeft(member) if left else MemberLost(member))
        return effects + [MemberJoined(member) for member in joined.values()]

    def _spread(self, news: News, without: tuple[Worker, ...]) -> list[Effect]:
        """Returns messages with `news` to the next member on the ring and to random members.

        The ring is the fixed circular order of all workers. Workers in `without` get no message. Returns an
        empty list if there is nobody to send to.
        """
        return [SendMessage(target, news) for target in self._targets(without)]

    def _targets(self, without: tuple[Worker, ...]) -> list[Worker]:
        """Returns the members to send news to: the next one on the ring, and at most `CHANCE_TARGETS` random ones.

        The ring is the fixed circular order of all workers. Leaves out this worker, those in `without`, and watched
        workers that do not answer. May be an empty list.
        """
        # Not to those that may be dead: of many that are lost together, the first news is of a few.
        without = (self.me.number, *without, *self.watching.quiet())
        successors = self.members.successors(self.me.number, len(without))
        targets = [number for number in successors if number not in without][:1]
        return targets + self.members.sample(CHANCE_TARGETS, self._pick, (*without, *targets))

    def _follow(self) -> None:
        """Chooses the members that get heartbeats from now on: the next `watching.span` members on the ring.

        The ring is the fixed circular order of all workers. If there are fewer other members, all of them get
        heartbeats. If there are none, nobody does.
        """
        self.watching.follow(self.members.successors(self.me.number, self.watching.span))

    def _is_about_me(self, message: Message) -> bool:
        """Returns whether a message says that this worker is gone."""
        me = self.me.number
        return isinstance(message, News) and any(first <= me <= last for first, last in (*message.left, *message.lost))

    def _expelled(self) -> list[Effect]:
        """Ends the protocol for this worker, and returns `[Expelled()]`."""
        self.is_out = True
        self._asked.clear()
        return [Expelled()]
