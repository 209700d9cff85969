"""Restricted workers take tensors, and nothing that leads outside of their memory."""

from __future__ import annotations

import pickle
import warnings
from pickletools import optimize
from typing import Any

import pytest
import torch

from farcall.errors import NotAllowedError, SerializationError
from farcall.pytorch import restricted_tensors, tensors
from farcall.security.allowed import AllowList
from farcall.serialization import OUT_OF_BAND_MIN_BYTES, dumps, loads_restricted

restricted_tensors.allow_tensors()


def travelled(value: Any) -> Any:
    payload, buffers = dumps(value)
    return loads_restricted(payload, [bytearray(buffer) for buffer in buffers], AllowList([]))


class Call:
    """A pickle that calls that."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "sent",
    [
        torch.rand(2, 2),
        torch.tensor(3),
        torch.empty(0, 3),
        torch.rand(OUT_OF_BAND_MIN_BYTES),
        torch.rand(4, 5).t(),
        torch.rand(5, 5)[:, 2:4],
        torch.rand(1).expand(3),
        torch.rand(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_tensors_are_plain_data(sent: torch.Tensor) -> None:
    got = travelled({"it": [sent, sent]})["it"][0]
    assert type(got) is type(sent)
    assert (got.dtype, got.requires_grad) == (sent.dtype, sent.requires_grad)
    assert torch.equal(got, sent)


def test_sparse_tensors_are_plain_data() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sent in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
            assert torch.equal(travelled(sent).to_dense(), torch.eye(3))


class Forged:
    """Not a tensor, though it has the methods of one."""

    def detach(self) -> Any:
        raise AssertionError("it was called")

    expand = requires_grad_ = detach


@pytest.mark.parametrize(
    "call",
    [
        Call(tensors.rebuild_tensor, b"12345678", "float32", (1 << 40,)),
        Call(tensors.rebuild_tensor, b"12345678", "float32", (2,), (1 << 40,)),
        Call(tensors.rebuild_tensor, b"12345678", "bfloat16", (2, 3)),
        Call(tensors.rebuild_tensor, [1, 2], "float32", (1,)),
        Call(tensors.rebuild_tensor, b"12345678", "qint8", (8,)),
        Call(tensors.rebuild_with_gaps, torch.ones(2), (1 << 40,), False),
        Call(tensors.rebuild_parameter, {"detach": 1}, False),
        Call(tensors.rebuild_coordinates, torch.tensor([[9]]), torch.ones(1), (2,), False, False),
        Call(tensors.rebuild_compressed, "csr", torch.tensor([0, 5]), torch.tensor([0]), torch.ones(1), (1, 1), False),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_does_not_fit_is_refused(call: Call) -> None:
    with pytest.raises(SerializationError):
        travelled(call)


def test_only_tensors_are_parts_of_tensors() -> None:
    for function in (tensors.rebuild_parameter, tensors.rebuild_expanded):
        with pytest.raises(TypeError, match="Forged was sent as a part of a tensor"):
            restricted_tensors.make_checked(function)(Forged(), False)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_what_torch_rebuilds_is_not_taken() -> None:
    quantized = torch.quantize_per_tensor(torch.rand(2), 0.1, 2, torch.quint8)
    for sent in (quantized, Call(torch._utils._rebuild_tensor, 1, 0, (1,), (1,)), torch.rand(2).untyped_storage()):
        with pytest.raises(NotAllowedError):
            travelled(sent)
    with pytest.raises(NotAllowedError):
        loads_restricted(pickle.dumps(torch.rand(2)), [], AllowList([]))


def test_truth_values_are_0_or_1() -> None:
    got = travelled(Call(tensors.rebuild_tensor, b"\2\0\377", "bool", (3,)))
    assert got.view(torch.uint8).tolist() == [1, 0, 1]


# One memory for several


def called(module: str, name: str, *args: Any) -> bytes:
    arguments = b"".join(arg if type(arg) is bytes else optimize(pickle.dumps(arg, 3))[2:-1] for arg in args)
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)]
    return texts[0] + texts[1] + b"\x93(" + arguments + b"tR"


def indices_of(memory: bytes) -> bytes:
    indices = called("farcall.pytorch.tensors", "rebuild_tensor", memory, "int64", (1, 4))
    values = called("farcall.pytorch.tensors", "rebuild_tensor", b"C\x10" + bytes(16), "float32", (4,))
    return called("farcall.pytorch.tensors", "rebuild_coordinates", indices, values, (5,), False, False)


GOOD = b"".join(number.to_bytes(8, "little") for number in (0, 1, 2, 4))


def test_indices_are_not_changed_by_a_tensor_of_truth_values_in_the_same_memory() -> None:
    """Its truth values are made 0 or 1; if that were done in place, each of these indices would become 2**56 or so."""
    memory, again = b"\x97\x94", b"h\0"
    truths = called("farcall.pytorch.tensors", "rebuild_tensor", again, "bool", (32,))
    payload = b"\x80\x05" + memory + b"0" + indices_of(again) + truths + b"\x86."
    buffer = bytearray(GOOD)
    sparse, _ = loads_restricted(payload, [buffer], AllowList([]))
    assert sparse._indices().tolist() == [[0, 1, 2, 4]]
    buffer[:] = b"\xff" * 32
    assert sparse._indices().tolist() == [[0, 1, 2, 4]]


def test_indices_are_not_changed_by_writing_into_their_memory() -> None:
    memory = b"\x96" + (32).to_bytes(8, "little") + GOOD + b"\x94"
    payload = b"\x80\x05" + memory + indices_of(b"h\0") + b"\x86."
    received, sparse = loads_restricted(payload, [], AllowList([]))
    received[7] = 0x7F
    assert sparse._indices().tolist() == [[0, 1, 2, 4]]


def test_truth_values_are_0_or_1_whatever_is_written_later() -> None:
    memory = b"\x96" + (4).to_bytes(8, "little") + b"\0\1\2\xff" + b"\x94"
    truths = called("farcall.pytorch.tensors", "rebuild_tensor", b"h\0", "bool", (4,))
    payload = b"\x80\x05" + memory + truths + b"\x86."
    received, made = loads_restricted(payload, [], AllowList([]))
    received[0] = 0x7F
    assert made.view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_truth_values_that_are_shown_many_times_take_little_memory() -> None:
    call = Call(tensors.rebuild_tensor, b"\7", "bool", (1 << 40,), (0,))
    assert loads_restricted(pickle.dumps(call), (), AllowList([])).untyped_storage().nbytes() == 1


def test_parts_of_sparse_tensors_that_are_shown_many_times_are_refused() -> None:
    many = Call(tensors.rebuild_expanded, Call(tensors.rebuild_tensor, bytes(8), "int64", (1, 1)), (1, 1 << 40), False)
    values = Call(tensors.rebuild_expanded, Call(tensors.rebuild_tensor, bytes(4), "float32", (1,)), (1 << 40,), False)
    call = Call(tensors.rebuild_coordinates, many, values, (1,), False, False)
    with pytest.raises(SerializationError, match="same elements many times"):
        loads_restricted(pickle.dumps(call), (), AllowList([]))
