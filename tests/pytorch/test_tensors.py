"""Tensors arrive as they were sent: every type of elements, every shape, every stride; writable, and their own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farcall.errors import SerializationError
from farcall.pytorch import tensors
from farcall.pytorch.tensors import MAX_GAPPED_BYTES, rebuild_tensor, rebuild_with_gaps, receiving_apart, sending_apart
from farcall.serialization import OUT_OF_BAND_MIN_BYTES, dumps, dumps_arguments, dumps_inline, dumps_result, loads

KINDS = sorted(tensors._TYPES)


def travelled(value: Any) -> Any:
    """The value as it arrives, with what is beside the pickle in memory of its own."""
    payload, buffers = dumps(value)
    return loads(payload, [bytearray(buffer) for buffer in buffers])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all their bits are the same: NaNs too, and of types for which torch cannot compare."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bytes(one.contiguous().view(torch.uint8).flatten().tolist())
        == bytes(other.contiguous().view(torch.uint8).flatten().tolist())
        if one.dim()
        else same(one.reshape(1), other.reshape(1))
    )


def of_kind(name: str, count: int) -> torch.Tensor:
    """Some elements of a type, of all kinds of bits that it can have."""
    kind = tensors._TYPES[name]
    size = kind.itemsize * count
    if kind is torch.bool:
        return torch.arange(count).remainder(3).eq(0)
    return (
        torch.arange(7, 7 + 31 * size, 31).remainder(251).to(torch.uint8).view(kind)
        if size
        else torch.empty(0, dtype=kind)
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [0, 1, 24, OUT_OF_BAND_MIN_BYTES])
def test_every_type_of_elements(name: str, count: int) -> None:
    sent = of_kind(name, count)
    assert same(travelled(sent), sent)
    if count == 24:
        assert same(travelled(sent.view(2, 3, 4)), sent.view(2, 3, 4))
        assert travelled(sent.view(4, 6).t()).stride() == (1, 6)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Views of all kinds: permuted, with steps, narrowed, expanded, overlapping, conjugated."""
    kind = draw(
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint16])
    )
    shape = draw(shapes)
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(kind)
    if kind.is_complex:
        tensor = tensor * (1 + 2j)
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.sampled_from(["permute", "step", "narrow", "expand", "unfold", "conj", "select"])):
            case "permute":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            case "step" if tensor.dim():
                tensor = tensor[:: draw(st.integers(1, 3))]
            case "narrow" if tensor.dim():
                tensor = tensor[..., draw(st.integers(0, 2)) :]
            case "expand":
                tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
            case "unfold" if tensor.dim() and tensor.shape[0] >= 2:
                tensor = tensor.unfold(0, 2, 1)
            case "conj" if kind.is_complex:
                tensor = tensor.conj()
                if draw(st.booleans()):
                    tensor = tensor.imag
                    kind = torch.float32
            case "select" if tensor.dim() and tensor.shape[0]:
                tensor = tensor[0]
    return tensor


@settings(deadline=None)
@given(views(), st.booleans())
def test_views_arrive_equal(sent: torch.Tensor, requires_grad: bool) -> None:
    requires_grad = requires_grad and (sent.is_floating_point() or sent.is_complex())
    if requires_grad:
        sent = sent.detach().requires_grad_()
    got = travelled(sent)
    assert (got.dtype, got.shape, got.requires_grad, got.is_leaf) == (sent.dtype, sent.shape, requires_grad, True)
    assert torch.equal(got, sent)


@settings(deadline=None)
@given(views())
def test_strides_are_kept_where_the_rules_say_so(sent: torch.Tensor) -> None:
    got = travelled(sent)
    extent = 1 + sum((length - 1) * stride for length, stride in zip(sent.shape, sent.stride(), strict=True))
    is_plain = not sent.is_conj() and not sent.is_neg() and 0 not in sent.stride()
    if sent.numel() and is_plain and extent >= sent.numel() and len(set(sent.stride())) == sent.dim():
        assert all(
            ours == theirs or length == 1
            for ours, theirs, length in zip(got.stride(), sent.stride(), sent.shape, strict=True)
        )


def test_a_view_sends_what_it_shows() -> None:
    large = torch.zeros(1000, 1000)
    for view in (large[:, 3], large[5], large[::500], large.t()[7:9], large[0, 0].expand(1000, 1000)):
        payload, buffers = dumps(view)
        assert len(payload) + sum(buffer.nbytes for buffer in buffers) < 10_000
        assert torch.equal(loads(payload, buffers), view)


def test_expanded_tensors_with_dimensions_of_one() -> None:
    view = torch.arange(6.0).view(3, 2)[::2].unsqueeze(2).expand(2, 2, 1).unsqueeze(0).expand(4, 2, 2, 1)[:, :, 1:]
    got = travelled(view)
    assert torch.equal(got, view)
    assert got.stride(0) == 0


def test_gaps_are_not_filled_with_what_was_in_them() -> None:
    secret = torch.full((5, 5), 77, dtype=torch.uint8)
    secret[:, 2:4] = 1
    view = secret[:, 2:4]
    payload, _ = dumps(view)
    assert b"M" * 3 not in payload
    got = loads(payload)
    assert got.stride() == (5, 1)
    assert torch.equal(got, view)


def test_large_gaps_are_closed() -> None:
    view = torch.zeros(2, MAX_GAPPED_BYTES)[:, ::3]
    assert travelled(view).is_contiguous()


def test_large_tensors_are_beside_the_pickle_and_not_copied() -> None:
    sent = torch.zeros(OUT_OF_BAND_MIN_BYTES, dtype=torch.uint8)
    payload, [buffer] = dumps(sent)
    sent[5] = 9
    assert len(payload) < 200
    assert buffer[5] == 9
    memory = bytearray(buffer)
    got = loads(payload, [memory])
    memory[6] = 8
    assert got[5] == 9
    assert got[6] == 8


def test_a_permuted_tensor_is_not_copied() -> None:
    sent = torch.zeros(200, 300)
    payload, [buffer] = dumps(sent.t())
    sent[0, 0] = 1
    assert loads(payload, [buffer])[0, 0] == 1


def test_memory_that_is_being_sent_stays_though_the_tensor_goes() -> None:
    sent = torch.full((OUT_OF_BAND_MIN_BYTES,), 7, dtype=torch.uint8)
    _, [buffer] = dumps(sent)
    storage = sent.untyped_storage()
    del sent
    assert bytes(buffer[:4]) == b"\7\7\7\7"
    assert storage.nbytes() == OUT_OF_BAND_MIN_BYTES


def test_memory_goes_back_with_the_tensor() -> None:
    class Memory(bytearray):
        pass

    payload, [buffer] = dumps(torch.zeros(OUT_OF_BAND_MIN_BYTES, dtype=torch.uint8))
    memory = Memory(buffer)
    gone = weakref.ref(memory)
    got = loads(payload, [memory])
    del memory
    assert gone() is not None
    part = got[3:]
    del got
    gc.collect()
    assert gone() is not None
    assert part[0] == 0
    del part
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("length", [3, OUT_OF_BAND_MIN_BYTES])
def test_what_arrives_can_be_written_to_even_if_its_memory_cannot(length: int) -> None:
    payload, buffers = dumps(torch.zeros(length))
    for memory in ([bytearray(buffer) for buffer in buffers], [bytes(buffer) for buffer in buffers]):
        got = loads(payload, memory)
        got += 1
        assert got.sum() == length
        assert loads(payload, [bytes(buffer) for buffer in buffers]).sum() == 0


def test_one_object_arrives_as_one_and_shared_memory_as_two() -> None:
    tensor = torch.zeros(4)
    one, again, view = travelled([tensor, tensor, tensor[:2]])
    assert one is again
    one[0] = 1
    assert view[0] == 0


def test_history_does_not_travel() -> None:
    weight = torch.ones(2, requires_grad=True)
    got, leaf = travelled([weight * 2, weight])
    assert got.is_leaf
    assert got.requires_grad
    assert leaf.requires_grad
    assert torch.equal(got, torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parameters_arrive_as_parameters(requires_grad: bool) -> None:
    got = travelled(nn.Parameter(torch.ones(2, 2), requires_grad))
    assert type(got) is nn.Parameter
    assert got.requires_grad is requires_grad
    assert torch.equal(got, torch.ones(2, 2))


def test_modules_and_packed_sequences() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    got = travelled(module)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got.parameters(), module.parameters(), strict=True))
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert torch.equal(travelled(packed).data, packed.data)


# Without pickle


@pytest.mark.parametrize("shape", [(3,), (2, 2), (), (1, 2, 3), (OUT_OF_BAND_MIN_BYTES,)])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.int16, torch.complex64])
def test_plain_tensors_need_no_pickle(shape: tuple[int, ...], kind: torch.dtype) -> None:
    sent = torch.arange(torch.Size(shape).numel()).reshape(shape).to(kind)
    for payload, buffers in (dumps_result(len, sent), dumps_arguments(len, (sent, sent + 1))):
        assert payload[0] == 1
        got = loads(payload, [bytearray(buffer) for buffer in buffers])
        first = got[0] if type(got) is tuple else got
        assert type(first) is torch.Tensor
        assert first.dtype == kind
        assert torch.equal(first, sent)
        first += 1
        assert torch.equal(first, sent + 1)


@pytest.mark.parametrize(
    "sent",
    [
        torch.ones(2, requires_grad=True),
        torch.ones(2, 2)[:, 0],
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(0),
        torch.eye(2).to_sparse(),
        nn.Parameter(torch.ones(2)),
        torch.ones([1] * 9),
    ],
)
def test_other_tensors_are_pickled(sent: torch.Tensor) -> None:
    for payload, buffers in (dumps_result(len, sent), dumps_arguments(len, (sent,))):
        assert payload[0] == 0x80
        got = loads(payload, buffers)
        first = got[0] if type(got) is tuple else got
        assert (type(first), first.dtype, first.requires_grad) == (type(sent), sent.dtype, sent.requires_grad)


def test_one_tensor_that_is_two_arguments_arrives_as_one() -> None:
    sent = torch.ones(2)
    one, other = loads(*dumps_arguments(max, (sent, sent)))
    assert one is other


# Apart


def test_tensors_apart_from_their_pickle() -> None:
    weight, values = nn.Parameter(torch.ones(2)), torch.ones(3)
    with sending_apart() as found:
        body = dumps_inline({"w": weight, "v": [values, values]})
    assert [id(tensor) for tensor in found] == [id(weight), id(values)]
    with receiving_apart([torch.zeros(1), torch.zeros(5)]):
        got = loads(body)
    assert got["w"].shape == (1,)
    assert got["v"][0] is got["v"][1]
    with pytest.raises(SerializationError, match="recv_tables"):
        loads(body)


# What does not fit


@pytest.mark.parametrize(
    ("memory", "name", "shape", "strides"),
    [
        (bytearray(8), "float32", (3,), None),
        (bytearray(8), "bfloat16", (5,), None),
        (bytearray(8), "float32", (2,), (2,)),
        (bytearray(8), "float32", (2,), (-1,)),
        (bytearray(8), "float32", (-2,), None),
        (bytearray(0), "float32", (1,), None),
        (bytearray(8), "qint8", (8,), None),
        ([0] * 8, "float32", (2,), None),
    ],
)
def test_a_tensor_outside_of_its_memory_is_not_made(memory: Any, name: str, shape: Any, strides: Any) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError, KeyError)):
        rebuild_tensor(memory, name, shape, strides)


def test_no_more_memory_is_taken_for_gaps_than_is_sent_that_way() -> None:
    with pytest.raises(ValueError, match="strides"):
        rebuild_with_gaps(torch.zeros(2), (1 << 40,), False)


def test_memory_cannot_be_made_longer_under_a_tensor() -> None:
    memory = bytearray(64)
    tensor = rebuild_tensor(memory, "bfloat16", (32,))
    with pytest.raises(BufferError):
        memory.extend(bytes(1 << 20))
    assert tensor.numel() == 32
