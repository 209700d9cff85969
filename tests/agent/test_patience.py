"""What was asked for ahead is waited for a little longer than anything else, as long as that pays."""

from __future__ import annotations

from farcall.agent.patience import Patience


class Answer:
    """Comes at the given look, or never."""

    def __init__(self, look: int | None) -> None:
        self.look = look
        self.looks = 0

    def poll(self, milliseconds: int) -> bool:
        assert milliseconds == 1
        self.looks += 1
        return self.looks == self.look


def test_it_looks_again_once() -> None:
    patience = Patience()
    answers = [Answer(1), Answer(2), Answer(3)]
    assert [patience.doze(answer.poll) for answer in answers] == [True, True, False]
    assert [answer.looks for answer in answers] == [1, 2, 2]


def test_it_goes_on_as_long_as_it_pays() -> None:
    patience = Patience()
    assert all(patience.doze(Answer(2).poll) for _ in range(1000))


def test_it_rests_if_it_does_not_pay_and_is_tried_again() -> None:
    patience = Patience()
    never = Answer(None)
    for _ in range(20):
        patience.doze(never.poll)
    assert never.looks < 40
    tried = never.looks
    for _ in range(100):
        patience.doze(never.poll)
    assert never.looks > tried


def test_it_finds_back_after_a_rest() -> None:
    patience = Patience()
    while patience.doze(Answer(None).poll) is not None:
        pass
    found = [patience.doze(Answer(1).poll) for _ in range(2000)]
    assert found[-1]
    assert all(found[found.index(True) :])
