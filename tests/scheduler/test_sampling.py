"""Sampling parameters: every field checked, named in the error, and kept on the wire."""

import json

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.arrays import NO_INT32, decode_column, encode_column
from scheduler.errors import InvalidRequest
from scheduler.plan import Admission
from scheduler.sampling import INT32_MAX, MAX_SEED, SamplingParams
from scheduler.structured import StructuredOutputs

NAN, INFINITY = float("nan"), float("inf")

OUT_OF_RANGE: dict[str, list[object]] = {
    "n": [0, -1, 257, 10**30],
    "temperature": [-0.1, 2.1, NAN, INFINITY, -INFINITY, -1, 10**400],
    "top_p": [0, 0.0, -0.5, 1.01, 2, NAN, INFINITY],
    "top_k": [-2, INT32_MAX + 1],
    "min_p": [-0.01, 1.01, NAN, INFINITY],
    "repetition_penalty": [0, 0.0, 0.009, -1.0, 100.5, NAN, INFINITY],
    "presence_penalty": [-2.1, 2.1, NAN, -INFINITY],
    "frequency_penalty": [-2.1, 2.1, NAN, INFINITY],
    "logit_bias": [
        {1: 100.1}, {1: -101}, {1: NAN}, {1: INFINITY}, {1: 10**400}, {2**40: 1.0},
        dict.fromkeys(range(1025), 1.0),
    ],
    "allowed_token_ids": [[], [2**40]],
    "bad_words": [[""], ["a", ""], ["x"] * 257],
    "bad_word_ids": [[[]], [[1], []], [[2**40]], [[1] * 129]],
    "seed": [MAX_SEED + 1, -MAX_SEED - 1],
    "max_tokens": [0, -1, INT32_MAX + 1],
    "min_tokens": [-1, 17],
    "stop": ["", [""], ["a", ""], ["x"] * 65, ["\ud800"]],
    "stop_token_ids": [[2**40], list(range(129))],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "grammar": ["", " \n", "a" * (2**20 + 1)],
}  # fmt: skip

WRONG_TYPE: dict[str, list[object]] = {
    "n": ["1", 1.0, True, None, [1]],
    "temperature": ["0.8", True, None, [0.5], 1j],
    "top_p": ["1", True, None],
    "top_k": ["5", 5.0, -1.0, True, None],
    "min_p": ["0", False, None],
    "repetition_penalty": ["1", True, None],
    "presence_penalty": ["0", True, None],
    "frequency_penalty": ["0", True, None],
    "logit_bias": [
        [1, 2], "1", 5, {"a": 1.0}, {1: "2"}, {1: True}, {1: None}, {1.5: 1.0}, {True: 1.0},
        {INFINITY: 1.0}, {None: 1.0}, {"1_0": 1.0}, {" 1": 1.0}, {"+1": 1.0}, {"1" * 5000: 1.0},
    ],
    "allowed_token_ids": ["12", 5, [1.0], ["1"], [True], [[1]], {"a": 1}],
    "bad_words": ["word", 5, [5], [None], [b"x"]],
    "bad_word_ids": [5, "12", [1, 2], [[1], 5], [["1"]], [[1.5]], ["12"], [[True]], [None]],
    "seed": ["1", 1.0, True],
    "max_tokens": ["16", 16.0, True],
    "min_tokens": ["0", 0.0, False, None],
    "stop": [5, [5], [None], [["a"]], b"a", {"a": 1}],
    "stop_token_ids": ["12", 5, [1.0], ["1"], [None], [False], [[1]]],
    "ignore_eos": [1, 0, "yes", None],
    "logprobs": ["1", 1.0, True],
    "prompt_logprobs": ["1", 1.0, False],
    "structured_outputs": [{"regex": "a"}, "a", 5, True],
    "grammar": [5, True, ["start: A"], {"json": {}}, b"start: A"],
    "skip_special_tokens": [1, "no", None],
    "include_stop_str_in_output": [0, "yes", None],
}  # fmt: skip

LEGAL: dict[str, list[object]] = {
    "n": [1, 256],
    "temperature": [0, 0.0, 1e-12, 2, 2.0],
    "top_p": [1e-9, 1, 1.0],
    "top_k": [-1, 0, 1, INT32_MAX],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 1, 100],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [None, {}, {0: 100, 5: -100}],
    "allowed_token_ids": [None, [0], (3, 3)],
    "bad_words": [None, [], ["a"]],
    "bad_word_ids": [None, [], [[1]], ((1, 2), [3])],
    "seed": [None, 0, MAX_SEED, -MAX_SEED],
    "max_tokens": [None, 1, INT32_MAX],
    "min_tokens": [0, 16],
    "stop": [None, [], "a", ["a", "b"], ("a",), ["\U0001f525"]],
    "stop_token_ids": [None, [], [0]],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "structured_outputs": [None, StructuredOutputs(choice=["yes", "no"])],
    "grammar": [None, 'start: "a"'],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
}

RICH = SamplingParams(
    n=2,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias={"7": 1, 9: -2.5},  # type: ignore[dict-item]  # as JSON gives it
    allowed_token_ids=[4, 9, 2],
    bad_words=["no"],
    bad_word_ids=[[5], [6, 7]],
    seed=-(2**62),
    max_tokens=None,
    min_tokens=20,
    stop=["END", "\n\n"],
    stop_token_ids=[11, 12],
    ignore_eos=True,
    logprobs=3,
    prompt_logprobs=0,
    structured_outputs=StructuredOutputs(json={"enum": ["ключ", 1.5, None]}),
    grammar="start: /[0-9]+/",
    skip_special_tokens=False,
    include_stop_str_in_output=True,
)


def made(**fields: object) -> SamplingParams:
    return SamplingParams(**fields)  # type: ignore[arg-type]


def cases(table: dict[str, list[object]]) -> list[tuple[str, object]]:
    return [(name, value) for name, values in table.items() for value in values]


def shown(value: object) -> str | None:
    return value[:30] if isinstance(value, str) else type(value).__name__


def test_the_tables_name_every_field() -> None:
    fields = set(SamplingParams.__struct_fields__)
    unordered = {"ignore_eos", "skip_special_tokens", "include_stop_str_in_output"}
    unordered.add("structured_outputs")

    assert set(WRONG_TYPE) == set(LEGAL) == fields
    assert set(OUT_OF_RANGE) == fields - unordered


@pytest.mark.parametrize(("name", "value"), cases(OUT_OF_RANGE), ids=shown)
def test_a_value_out_of_range_is_refused_and_the_field_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        made(**{name: value})

    assert refused.value.param == name
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(("name", "value"), cases(WRONG_TYPE), ids=shown)
def test_a_value_of_the_wrong_type_is_refused_and_the_field_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        made(**{name: value})

    assert refused.value.param == name


@pytest.mark.parametrize(("name", "value"), cases(LEGAL), ids=shown)
def test_the_edges_of_each_range_are_legal_and_survive_the_wire(name: str, value: object) -> None:
    others = {"temperature": 0.5} if name == "n" else {}

    params = made(**{name: value}, **others)

    assert over_the_wire(params) == params


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 2, "temperature": 0.001}, "n"),
        ({"n": 2, "seed": MAX_SEED}, "seed"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(**fields)

    assert refused.value.param == param


def test_an_error_says_the_field_the_range_and_what_came() -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(top_p=2)

    assert str(refused.value) == "top_p must be a number in (0, 1], got 2.0"


@pytest.mark.parametrize("value", [list("abc") * 1000, 10**5000], ids=["long", "huge"])
def test_an_error_repeats_only_the_start_of_a_long_value(value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(stop_token_ids=value)

    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-5, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_json_forms_are_taken_as_what_they_mean() -> None:
    body = json.loads(
        '{"temperature": 1, "top_k": -1, "stop": "END", "logit_bias": {"7": 1}, '
        '"stop_token_ids": [3], "bad_words": null, "seed": null}'
    )

    params = made(**body)

    assert isinstance(params.temperature, float)
    assert params.top_k == 0
    assert params.stop == ("END",)
    assert params.logit_bias == {7: 1.0}
    assert params.stop_token_ids == (3,)
    assert params.bad_words == ()
    assert params.seed is None


def test_nothing_that_the_caller_later_changes_is_shared() -> None:
    words, bias = [[1, 2]], {5: 1.0}
    params = SamplingParams(bad_word_ids=words, logit_bias=bias)

    words[0].append(3)
    words.append([4])
    bias[6] = 1.0

    assert params.bad_word_ids == ((1, 2),)
    assert params.logit_bias == {5: 1.0}


def test_only_what_looks_back_needs_history() -> None:
    assert not SamplingParams(temperature=0.8, top_k=5, logit_bias={1: 1.0}).needs_history
    assert not SamplingParams(min_tokens=5, allowed_token_ids=[1]).needs_history
    for looking_back in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(bad_word_ids=[[1, 2]]),
        SamplingParams(grammar='start: "a"'),
    ):
        assert looking_back.needs_history


# --- the vocabulary ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {99: 1.0, 100: 1.0}},
        {"allowed_token_ids": [0, 100]},
        {"stop_token_ids": [100]},
        {"bad_word_ids": [[1], [2, 100, 3]]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_id_outside_the_vocabulary_is_refused_with_both_numbers(
    fields: dict[str, object],
) -> None:
    params = made(**fields)
    (name,) = fields

    params.check_vocabulary(101)
    with pytest.raises(InvalidRequest, match=rf"{name} holds token id 100; .* 0 to 99") as refused:
        params.check_vocabulary(100)

    assert refused.value.param == name


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"-1": 1.0}},
        {"allowed_token_ids": [-1]},
        {"stop_token_ids": [5, -1]},
        {"bad_word_ids": [[-1]]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_negative_id_is_outside_every_vocabulary(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="holds token id -1"):
        made(**fields).check_vocabulary(100)


def test_parameters_without_ids_fit_any_vocabulary() -> None:
    SamplingParams(stop=["a"], top_k=500, bad_words=["b"]).check_vocabulary(1)


# --- the wire ---------------------------------------------------------------------------


def over_the_wire(params: SamplingParams) -> SamplingParams:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)


def test_a_round_trip_keeps_every_field() -> None:
    """cases 24: what stops an output must not get lost between processes."""
    for name in SamplingParams.__struct_fields__:
        assert getattr(RICH, name) != getattr(SamplingParams(), name), f"{name} shows nothing"

    back = over_the_wire(RICH)

    assert back == RICH
    for name in SamplingParams.__struct_fields__:
        assert type(getattr(back, name)) is type(getattr(RICH, name)), name
    assert all(isinstance(word, tuple) for word in back.bad_word_ids)


def test_an_admission_keeps_end_and_stop_ids_on_the_wire() -> None:
    """cases 24 and 26: the two sets stay apart, so that ignore_eos concerns one only."""
    admission = Admission(slot=1, sampling=RICH, num_prompt=3, blocks=NO_INT32, end_ids=(2, 5))
    sent = msgspec.msgpack.Encoder(enc_hook=encode_column).encode(admission)

    back = msgspec.msgpack.Decoder(Admission, dec_hook=decode_column).decode(sent)

    assert back.end_ids == (2, 5)
    assert back.sampling == RICH
    assert back.sampling.stop_token_ids == (11, 12)


def test_defaults_take_no_room_and_another_library_reads_the_rest() -> None:
    assert msgpack.unpackb(msgspec.msgpack.encode(SamplingParams())) == {}

    read = msgpack.unpackb(msgspec.msgpack.encode(RICH), strict_map_key=False)

    assert read["logit_bias"] == {7: 1.0, 9: -2.5}
    assert read["bad_word_ids"] == [[5], [6, 7]]
    assert read["max_tokens"] is None


@pytest.mark.parametrize(
    "fields", [{"temperature": 5}, {"top_k": "a"}, {"stop": [""]}, {"logit_bias": {"x": 1}}]
)
def test_what_comes_over_the_wire_is_checked_again(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgpack.packb(fields), type=SamplingParams)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), JSON, max_size=4))
def test_whatever_json_gives_is_either_valid_or_an_invalid_request(
    fields: dict[str, object],
) -> None:
    try:
        params = made(**fields)
    except InvalidRequest as error:
        refused = error
    else:
        assert over_the_wire(params) == params
        return
    assert refused.param in fields


def test_numpy_scalars_are_refused_and_not_half_taken() -> None:
    with pytest.raises(InvalidRequest, match="top_k"):
        made(top_k=np.int64(5))
