"""Columns on the wire: raw little-endian buffers, nothing else."""

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.arrays import (
    NO_BOOL,
    NO_FLOAT32,
    NO_INT32,
    NO_UINT8,
    BoolArray,
    Float32Array,
    Int32Array,
    Uint8Array,
    decode_column,
    encode_column,
    int32,
)
from scheduler.plan import LogprobRows, StepPlan, StepResult

INT32 = st.integers(-(2**31), 2**31 - 1)


class Columns(msgspec.Struct, omit_defaults=True):
    """One of each kind."""

    ints: Int32Array = NO_INT32
    codes: Uint8Array = NO_UINT8
    numbers: Float32Array = NO_FLOAT32
    flags: BoolArray = NO_BOOL


def encoded(message: object) -> bytes:
    return msgspec.msgpack.Encoder(enc_hook=encode_column).encode(message)


def decoded(sent: bytes) -> Columns:
    return msgspec.msgpack.Decoder(Columns, dec_hook=decode_column).decode(sent)


@given(st.lists(INT32), st.lists(st.integers(0, 255)), st.lists(st.floats(width=32)), st.binary())
def test_columns_survive_the_wire_bit_for_bit(
    ints: list[int], codes: list[int], numbers: list[float], flags: bytes
) -> None:
    columns = Columns(
        int32(ints),
        np.array(codes, dtype=np.uint8),
        np.array(numbers, dtype=np.float32),
        np.array([flag % 2 == 1 for flag in flags], dtype=np.bool_),
    )

    back = decoded(encoded(columns))

    for name in Columns.__struct_fields__:
        before, after = getattr(columns, name), getattr(back, name)
        assert after.dtype == before.dtype
        assert after.tobytes() == before.tobytes()


def test_a_column_is_its_little_endian_buffer_to_another_library() -> None:
    sent = encoded(Columns(ints=int32([1, -2]), flags=np.array([True, False])))

    assert msgpack.unpackb(sent) == {
        "ints": b"\x01\x00\x00\x00\xfe\xff\xff\xff",
        "flags": b"\x01\x00",
    }


def test_an_absent_column_takes_no_room_and_comes_back_empty() -> None:
    assert encoded(Columns()) == b"\x80"

    back = decoded(b"\x80")

    assert [len(getattr(back, name)) for name in Columns.__struct_fields__] == [0, 0, 0, 0]


def test_an_empty_column_that_is_sent_comes_back_empty() -> None:
    assert len(decoded(msgpack.packb({"ints": b""})).ints) == 0


def test_a_strided_view_is_sent_as_the_values_it_shows() -> None:
    back = decoded(encoded(Columns(ints=int32(range(10))[::-3])))

    assert back.ints.tolist() == [9, 6, 3, 0]


def test_a_received_column_and_the_empty_defaults_cannot_be_written() -> None:
    back = decoded(encoded(Columns(ints=int32([1, 2]))))

    for column in (back.ints, back.codes, NO_INT32, NO_UINT8, NO_FLOAT32, NO_BOOL):
        assert not column.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        back.ints[0] = 5


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3, dtype=np.int64),
        np.zeros(3, dtype=np.float64),
        np.zeros(3, dtype=">i4"),
        np.zeros((2, 2), dtype=np.int32),
        np.zeros((), dtype=np.int32),
        np.zeros(3, dtype=object),
        np.int32(5),
        object(),
        {1, 2}.__iter__(),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_anything_but_a_column_of_the_four_kinds_is_not_sent(value: object) -> None:
    with pytest.raises(NotImplementedError, match="on the wire"):
        encode_column(value)


@pytest.mark.parametrize("value", [b"\x00", b"\x00" * 7])
def test_a_torn_column_is_refused(value: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="ints"):
        decoded(msgpack.packb({"ints": value}))


@pytest.mark.parametrize("value", [[1, 2], "abcd", 5, None, {"a": 1}, 1.5])
def test_a_column_that_is_not_binary_is_refused(value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"binary data.*ints"):
        decoded(msgpack.packb({"ints": value}))


def test_a_type_that_is_no_column_has_no_wire_form() -> None:
    with pytest.raises(NotImplementedError, match="no wire form"):
        decode_column(complex, b"\x00")


def test_int32_refuses_what_does_not_fit() -> None:
    assert int32([1, 2]).dtype == np.int32
    with pytest.raises(OverflowError):
        int32([2**31])


def test_a_result_with_logprobs_survives_the_wire() -> None:
    result = StepResult(
        epoch=3,
        step=9,
        token=int32([5, 6]),
        logprobs=LogprobRows(
            row=int32([1]),
            position=int32([40]),
            width=2,
            token=int32([6, 7]),
            logprob=np.array([-0.5, -np.inf], dtype=np.float32),
            rank=int32([1]),
        ),
        compute_s=0.25,
    )

    back = msgspec.msgpack.Decoder(StepResult, dec_hook=decode_column).decode(encoded(result))

    assert (back.epoch, back.step, back.compute_s) == (3, 9, 0.25)
    assert back.token.tolist() == [5, 6]
    assert back.logprobs is not None
    assert back.logprobs.token.tolist() == [6, 7]
    assert back.logprobs.logprob.tolist() == [-0.5, -np.inf]


def test_a_steady_decode_step_of_256_sequences_is_small() -> None:
    slots = np.arange(256, dtype=np.int32)
    plan = StepPlan(epoch=1, step=1000, slot=slots, start=slots + int32(500))
    result = StepResult(epoch=1, step=1000, token=slots + int32(40000), compute_s=0.01)

    assert len(encoded(plan)) + len(encoded(result)) < 4096
