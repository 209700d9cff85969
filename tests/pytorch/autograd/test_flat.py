"""`autograd.flat`: what goes in a row and comes out the same, what does not go, and what is no such row."""

from __future__ import annotations

import struct
from typing import Any

import numpy
import pytest
import torch

from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.autograd.flat import (
    answer_of,
    flatten,
    pack_gradient,
    pack_ids,
    pack_tensor,
    read_answer,
    read_ids,
    tensor_of,
    unflatten,
)
from farcall.serialization import pack_array

THERE = WorkerInfo("there", 1)


def test_plain_values_and_small_tensors_come_out_the_same() -> None:
    args = (torch.arange(6.0).view(2, 3), 7, "word", None, True, 2.5, torch.tensor([1, 2]))
    row = flatten(args, THERE)
    assert row is not None
    found = unflatten(row.values)
    assert [type(each) for each in found] == [type(each) for each in args]
    assert found[1:6] == list(args[1:6])
    for before, after in ((args[0], found[0]), (args[6], found[6])):
        assert after.dtype is before.dtype
        assert torch.equal(after, before)
    found[0].add_(1)  # its memory is its own
    assert args[0][0, 0] == 0


def test_a_row_says_which_tensors_require_gradients() -> None:
    leaf, weight = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3))
    row = flatten((torch.ones(1), leaf, 1, weight), THERE)
    assert row is not None
    assert row.mask == 0b1010
    assert row.tensors[0] is leaf
    assert row.tensors[1] is weight
    assert all(type(each) is torch.Tensor and not each.requires_grad for each in unflatten(row.values)[1::2])


SAME = torch.ones(2)


@pytest.mark.parametrize(
    "args",
    [
        (SAME, SAME),
        (torch.ones(1 << 13),),
        (torch.ones(4, 4).t(),),
        (torch.ones(2, dtype=torch.bool),),
        (torch.empty(0),),
        (torch.eye(2).to_sparse(),),
        (torch.nn.Parameter(torch.ones(2), requires_grad=False),),
        (b"\x02" + bytes(32),),
        ([1],),
        (1, {"a": 1}),
    ],
    ids=["twice", "large", "strided", "bool", "empty", "sparse", "parameter", "bytes", "list", "dict"],
)
def test_what_does_not_go_in_a_row(args: tuple[Any, ...]) -> None:
    assert flatten(args, THERE) is None


@pytest.mark.parametrize(
    "value", [[1], b"", b"\x01", b"\x01\x00\x4a\x01" + bytes(8) + b"x", b"\x03abc", bytearray(b"\x01")]
)
def test_what_is_no_row_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="came from another worker"):
        unflatten([value])
    with pytest.raises(TypeError, match="in place of a tensor"):
        tensor_of(value)


@pytest.mark.parametrize(
    "gradient",
    [torch.ones(()).expand(3, 4), torch.arange(6.0).view(2, 3).t(), torch.arange(8.0)[::2], torch.ones(2)],
    ids=["of a sum", "turned", "with gaps", "plain"],
)
def test_a_small_gradient_goes_whatever_its_strides(gradient: torch.Tensor) -> None:
    packed = pack_gradient(gradient)
    assert packed is not None
    found = tensor_of(packed)
    assert torch.equal(found, gradient)
    assert found.is_contiguous()


@pytest.mark.parametrize(
    "gradient",
    [torch.eye(2).to_sparse(), torch.ones(()).expand(100, 100), torch.ones(2, dtype=torch.cfloat).conj()],
    ids=["sparse", "large", "conjugate"],
)
def test_other_gradients_go_the_usual_way(gradient: torch.Tensor) -> None:
    assert pack_gradient(gradient) is None


def test_no_array_comes_in_place_of_a_tensor() -> None:
    packed = pack_array(numpy.ones(2))
    assert packed is not None
    with pytest.raises(TypeError, match="in place of a tensor"):
        tensor_of(packed[0])


def test_answers_come_out_the_same() -> None:
    tensor = torch.randn(3, 2)
    packed = pack_tensor(tensor)
    assert packed is not None
    for stamp in (5, (1 << 64) - 1, 1 << 64, (1 << 128) - 1):
        is_sent, first, second, found = read_answer(answer_of(True, stamp, (1 << 64) - 1, packed))
        assert (is_sent, first, second) == (True, stamp, (1 << 64) - 1)
        assert torch.equal(found, tensor)
    with pytest.raises(TypeError, match="no answer"):
        read_answer(b"\x01\x02")


def test_numbers_come_out_the_same() -> None:
    assert read_ids(pack_ids([])) == ()
    assert read_ids(pack_ids([3, (1 << 64) - 1])) == (3, (1 << 64) - 1)
    for wrong in (b"1234567", "12345678", [1]):
        with pytest.raises(TypeError, match="in place of numbers"):
            read_ids(wrong)
    with pytest.raises(struct.error):
        pack_ids([-1])
