"""The sampler as a whole: fair draws, and company that changes nothing."""

import itertools
from copy import copy

import numpy as np
import pytest
import torch
from msgspec.structs import force_setattr, replace

from scheduler.arrays import NO_INT32, Int32Array, int32
from scheduler.plan import Admission, LogprobRows
from scheduler.sampling import SamplingParams
from tests.worker.chi_square import assert_fits
from worker.ranking import BadLogits
from worker.sampler import Sampler, first_above

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 12
NUM_DRAWS = 20_000
PROMPT = [3, 3, 5]
OUTPUT = [5, 8, 8, 1]
END_ID = 2


def admission(slot: int, params: SamplingParams, **changes: object) -> Admission:
    if params.seed is None:
        params = replace(params, seed=slot)
    built = Admission(
        slot=slot, sampling=params, num_prompt=len(PROMPT), blocks=NO_INT32, end_ids=(END_ID,)
    )
    return replace(built, **changes)


def logits_of(vocab_size: int, seed: int = 0, spread: float = 1.5) -> torch.Tensor:
    return spread * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """A copy without the checks, which would take longer than the draws."""
    params = copy(params)
    force_setattr(params, "seed", seed)
    return params


def log_of(tokens: list[int], num_slots: int) -> Int32Array:
    """A token log in which each slot has the same tokens, and nonsense behind them."""
    return np.tile(int32([*tokens, -1, -1]), (num_slots, 1))


def sample_one(
    logits: torch.Tensor,
    params: SamplingParams,
    tokens: list[int] | None = None,
    **changes: object,
) -> int:
    """The token of one sequence alone, after PROMPT and OUTPUT by default."""
    tokens = [*PROMPT, *OUTPUT] if tokens is None else tokens
    sampler = Sampler(1, len(logits), "cpu")
    sampler.admit(admission(0, replace(params, seed=params.seed or 0), **changes))
    found = sampler.sample(logits[None], int32([0]), int32([len(tokens)]), log_of(tokens, 1))
    return int(found.token[0])


def test_a_greedy_sequence_needs_no_seed() -> None:
    """The engine lets one pass without, so it must not end the rank."""
    logits = logits_of(VOCAB_SIZE)
    sampler = Sampler(1, VOCAB_SIZE, "cpu")
    unseeded = replace(
        admission(0, SamplingParams(temperature=0.0)), sampling=SamplingParams(temperature=0.0)
    )
    sampler.admit(unseeded)

    found = sampler.sample(logits[None], int32([0]), int32([3]), log_of(PROMPT, 1))

    assert int(found.token[0]) == int(logits.argmax())


# --- the distribution -------------------------------------------------------------------


def reference_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The definition in double precision, token by token, for what follows PROMPT and OUTPUT."""
    scores = logits.astype(np.float64).copy()
    for token in range(len(scores)):
        if token in PROMPT or token in OUTPUT:
            if scores[token] > 0:
                scores[token] /= params.repetition_penalty
            else:
                scores[token] *= params.repetition_penalty
        scores[token] -= params.frequency_penalty * OUTPUT.count(token)
        scores[token] -= params.presence_penalty * (token in OUTPUT)
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = -np.inf
        for word in params.bad_word_ids:
            before = list(word[:-1])
            if word[-1] == token and OUTPUT[len(OUTPUT) - len(before) :] == before:
                scores[token] = -np.inf
        if len(OUTPUT) < params.min_tokens and token in (END_ID, *params.stop_token_ids):
            scores[token] = -np.inf
    scores /= params.temperature
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    order = sorted(range(len(shares)), key=lambda token: (-shares[token], token))
    order = [token for token in order if shares[token] >= params.min_p * shares[order[0]]]
    order = order[: params.top_k or None]
    mass = sum(shares[token] for token in order)
    kept: list[int] = []
    while not kept or sum(shares[token] for token in kept) < params.top_p * mass - 1e-9:
        kept.append(order[len(kept)])
    result = np.zeros_like(shares)
    result[kept] = shares[kept] / shares[kept].sum()
    return result


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=1.7),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=4),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.4, top_k=9, top_p=0.8, min_p=0.01),
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=-0.6),
        SamplingParams(logit_bias={0: 2.0, 5: -3.0}, bad_word_ids=[[1, 6], [7], [8, 9]]),
        SamplingParams(allowed_token_ids=[0, 4, 5, 9, 11], top_p=0.9),
        SamplingParams(min_tokens=5, stop_token_ids=[0, 9], repetition_penalty=0.8),
    ],
    ids=lambda params: ",".join(f"{k}" for k in params.__struct_fields__ if differs(params, k)),
)
def test_20_000_draws_fit_the_distribution_that_the_definition_gives(
    params: SamplingParams,
) -> None:
    logits = logits_of(VOCAB_SIZE)
    sampler = Sampler(NUM_DRAWS, VOCAB_SIZE, "cpu")
    tokens = [*PROMPT, *OUTPUT]
    for slot in range(NUM_DRAWS):
        sampler.admit(admission(slot, with_seed(params, slot)))

    drawn = sampler.sample(
        logits.expand(NUM_DRAWS, VOCAB_SIZE).contiguous(),
        np.arange(NUM_DRAWS, dtype=np.int32),
        np.full(NUM_DRAWS, len(tokens), dtype=np.int32),
        log_of(tokens, NUM_DRAWS),
    ).token

    counts = np.bincount(drawn.numpy(), minlength=VOCAB_SIZE)
    assert_fits(counts, NUM_DRAWS * reference_distribution(logits.numpy(), params))


def differs(params: SamplingParams, name: str) -> bool:
    return bool(getattr(params, name) != getattr(SamplingParams(), name))


def test_the_positions_of_one_seed_fit_the_distribution_too() -> None:
    params = SamplingParams(seed=42, temperature=0.8, top_p=0.95)
    logits = logits_of(VOCAB_SIZE)
    sampler = Sampler(NUM_DRAWS, VOCAB_SIZE, "cpu")
    for slot in range(NUM_DRAWS):
        sampler.admit(admission(slot, params))
    slots = np.arange(NUM_DRAWS, dtype=np.int32)
    rows = logits.expand(NUM_DRAWS, VOCAB_SIZE).contiguous()

    drawn = sampler.sample(rows, slots, slots + int32(3), log_of(PROMPT, NUM_DRAWS)).token

    counts = np.bincount(drawn.numpy(), minlength=VOCAB_SIZE)
    assert_fits(counts, NUM_DRAWS * reference_distribution(logits.numpy(), params))


# --- the draw itself --------------------------------------------------------------------


def test_the_first_id_whose_running_sum_exceeds_the_number_is_taken() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]])

    def taken(number: float) -> int:
        return int(first_above(weights, torch.tensor([number], dtype=torch.float64))[0])

    assert [taken(number) for number in (0.0, 0.2, 0.25, 0.7499, 0.75, 0.999)] == [1, 1, 3, 3, 4, 4]


def test_a_weight_of_zero_is_never_taken_at_either_end() -> None:
    almost_1 = 1 - 2.0**-53
    generator = np.random.default_rng(0)
    for _ in range(300):
        weights = torch.from_numpy(generator.random((4, 50)).astype(np.float32))
        weights[torch.from_numpy(generator.random((4, 50)) < 0.7)] = 0.0
        weights[:, 20] = 1e-30
        for number in (0.0, 2.0**-53, 0.5, almost_1):
            columns = first_above(weights, torch.full((4,), number, dtype=torch.float64))
            assert bool((weights.gather(1, columns[:, None]) > 0).all())


def test_a_product_that_rounds_up_to_the_whole_sum_takes_the_last_possible_token() -> None:
    weights = torch.tensor([[5e-324, 0.0]], dtype=torch.float64)  # times 0.999... rounds up

    columns = first_above(weights, torch.tensor([1 - 2.0**-53], dtype=torch.float64))

    assert columns.tolist() == [0]


# --- greedy -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-5, 1e-3, 0.00999])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """cases 29: no overflow, the answer of temperature 0."""
    for seed in range(20):
        logits = logits_of(200, seed, spread=80.0)
        assert sample_one(logits, SamplingParams(temperature=temperature)) == int(logits.argmax())


def test_the_least_sampled_temperature_stays_finite_with_large_logits() -> None:
    logits = torch.tensor([3e29, -3e29, 2.9e29, -torch.inf])

    assert sample_one(logits, SamplingParams(temperature=0.01)) == 0


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(300)
    logits[[250, 40, 90]] = 1.0

    assert sample_one(logits, SamplingParams(temperature=0)) == 40


def test_16_equal_greedy_rows_give_one_answer() -> None:
    """cases 31."""
    sampler = Sampler(16, 500, "cpu")
    for slot in range(16):
        sampler.admit(admission(slot, SamplingParams(temperature=0)))
    logits = logits_of(500).expand(16, 500).contiguous()

    found = sampler.sample(
        logits, np.arange(16, dtype=np.int32), int32([7] * 16), log_of(PROMPT + OUTPUT, 16)
    )

    assert found.token.tolist() == [int(logits[0].argmax())] * 16


# --- company ----------------------------------------------------------------------------

FEATURES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=40),
    SamplingParams(temperature=1.5, top_k=300, top_p=0.9),
    SamplingParams(temperature=0.7, min_p=0.02),
    SamplingParams(temperature=0, repetition_penalty=1.2),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, logit_bias={3: 4.0}),
    SamplingParams(allowed_token_ids=list(range(0, 90, 3)), logprobs=0),
    SamplingParams(bad_word_ids=[[4], [5, 6]], top_p=0.99),
    SamplingParams(min_tokens=9, stop_token_ids=[8], temperature=2.0),
    SamplingParams(temperature=2.0, top_p=0.999, logprobs=20),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [97, 1024, 20011])
def test_a_row_gives_the_same_bits_alone_and_among_1_to_63_others(
    vocab_size: int, dtype: torch.dtype
) -> None:
    """cases 23 and 27: mixed features, seeded and unseeded neighbours."""
    generator = np.random.default_rng(vocab_size)
    num_slots = 64
    asked = [
        replace(FEATURES[slot % len(FEATURES)], seed=int(generator.integers(2**62)))
        for slot in range(num_slots)
    ]
    history = generator.integers(0, vocab_size, (num_slots, 40)).astype(np.int32)
    logits = torch.from_numpy(3 * generator.standard_normal((num_slots, vocab_size))).to(dtype)
    positions = generator.integers(4, 40, num_slots).astype(np.int32)

    def run(slots: list[int]) -> tuple[list[int], LogprobRows | None]:
        sampler = Sampler(num_slots, vocab_size, "cpu")
        for slot in slots:
            sampler.admit(admission(slot, asked[slot]))
        found = sampler.sample(
            logits[slots], int32(slots), positions[slots], history, rows=int32(slots)
        )
        return found.token.tolist(), found.logprobs

    alone = [run([slot]) for slot in range(num_slots)]
    for count in (2, 3, 8, 17, 33, 64):
        slots = generator.permutation(num_slots)[:count].tolist()
        tokens, rows = run(slots)
        assert tokens == [alone[slot][0][0] for slot in slots]
        assert logprob_bits(rows) == {
            slot: bits for slot in slots for bits in logprob_bits(alone[slot][1]).values()
        }


def logprob_bits(rows: LogprobRows | None) -> dict[int, tuple[list[int], bytes, int]]:
    """What each row says, without the padding of the others' width."""
    if rows is None:
        return {}
    ids = rows.token.reshape(-1, rows.width)
    values = rows.logprob.reshape(-1, rows.width)
    asked = ids != -1
    return {
        row: (ids[at][asked[at]].tolist(), values[at][asked[at]].tobytes(), int(rows.rank[at]))
        for at, row in enumerate(rows.row.tolist())
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [5, 97, 1024, 8191, 49152])
def test_torch_computes_the_softmax_of_a_row_to_the_same_bits_in_any_batch(
    vocab_size: int, dtype: torch.dtype
) -> None:
    """What the sampler's independence of company rests on; threads share out whole rows."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 6 * torch.randn(37, vocab_size, generator=generator, dtype=dtype)
    torch.set_num_threads(2)
    together = logits.softmax(dim=-1), logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    torch.set_num_threads(1)

    for row in range(37):
        alone = logits[row : row + 1].clone().softmax(dim=-1)
        assert torch.equal(alone[0], together[0][row])
        assert torch.equal(alone.cumsum(dim=-1, dtype=torch.float64)[0], together[1][row])


def test_a_seeded_request_repeats_itself_through_random_company() -> None:
    """cases 27: four runs with neighbours that come and go equal the solo run."""
    params = SamplingParams(seed=42, temperature=0.8, top_p=0.95, repetition_penalty=1.1)
    table = 2 * torch.randn(60, 60, generator=torch.Generator().manual_seed(0))

    def run(company: np.random.Generator | None) -> list[int]:
        sampler = Sampler(8, 60, "cpu")
        sampler.admit(admission(5, params))
        history = np.zeros((8, 64), dtype=np.int32)
        history[5, :3] = PROMPT
        held: set[int] = set()
        for position in range(3, 40):
            if company is not None:
                for slot in company.permutation([0, 1, 2, 3, 4, 6, 7])[:3].tolist():
                    if slot in held:
                        sampler.release(slot)
                    else:
                        other = FEATURES[int(company.integers(len(FEATURES)))]
                        if not other.allowed_token_ids:
                            sampler.admit(admission(slot, replace(other, seed=slot * position)))
                            held.add(slot)
                            continue
                    held.discard(slot)
            slots = [*sorted(held), 5] if position % 2 else [5, *sorted(held)]
            found = sampler.sample(
                table[[int(history[slot, position - 1]) for slot in slots]],
                int32(slots),
                int32([position] * len(slots)),
                history,
            )
            history[slots, position] = found.token.numpy()
        return history[5, 3:40].tolist()

    solo = run(None)

    assert len(set(solo)) > 10
    assert all(run(np.random.default_rng(seed)) == solo for seed in range(4))


def test_a_sequence_that_resumes_in_another_slot_goes_on_as_before() -> None:
    params = SamplingParams(seed=7, frequency_penalty=0.9, bad_word_ids=[[1, 2], [3]])
    table = 2 * torch.randn(60, 60, generator=torch.Generator().manual_seed(1))

    def run(moves: dict[int, int]) -> list[int]:
        sampler = Sampler(4, 60, "cpu")
        history = np.zeros((4, 64), dtype=np.int32)
        slot = 0
        history[0, :3] = PROMPT
        sampler.admit(admission(0, params))
        for position in range(3, 40):
            if position in moves:
                sampler.release(slot)
                history[moves[position]] = history[slot]
                history[slot] = 59
                slot = moves[position]
                sampler.admit(admission(slot, params))
            logits = table[int(history[slot, position - 1])][None]
            found = sampler.sample(logits, int32([slot]), int32([position]), history)
            history[slot, position] = int(found.token[0])
        return history[slot, 3:40].tolist()

    assert run({9: 2, 20: 3, 30: 1}) == run({})


def test_a_slot_keeps_nothing_of_the_sequence_before() -> None:
    logits = logits_of(200)
    sampler = Sampler(1, 200, "cpu")
    best = int(logits.argmax())
    for params in FEATURES:
        sampler.admit(admission(0, replace(params, logprobs=5, seed=3)))
        sampler.release(0)
        assert sampler.num_edited == 0
    sampler.admit(admission(0, SamplingParams(temperature=0)))

    found = sampler.sample(logits[None], int32([0]), int32([7]), log_of([best] * 7, 1))

    assert found.token.tolist() == [best]
    assert found.logprobs is None


def test_the_logits_given_are_left_as_they_are() -> None:
    sampler = Sampler(len(FEATURES), 100, "cpu")
    for slot, params in enumerate(FEATURES):
        sampler.admit(admission(slot, params))
    slots = np.arange(len(FEATURES), dtype=np.int32)
    logits = torch.stack([logits_of(100, seed) for seed in slots.tolist()])
    before = logits.clone()

    sampler.sample(logits, slots, np.full_like(slots, 7), log_of(PROMPT + OUTPUT, len(slots)))

    assert torch.equal(logits, before)


# --- rules on tokens --------------------------------------------------------------------


def test_presence_penalty_changes_nothing_on_the_first_step() -> None:
    """cases 22: it counts the output only, whatever the prompt repeats."""
    logits = logits_of(VOCAB_SIZE)
    logits[3] = 4.0

    params = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)

    assert sample_one(logits, params, tokens=PROMPT) == 3
    assert sample_one(logits, params, tokens=[*PROMPT, 3]) != 3


def test_no_end_or_stop_id_comes_before_min_tokens() -> None:
    """cases 24: with and without ignore_eos; afterwards both may come."""
    logits = torch.zeros(VOCAB_SIZE)
    logits[[END_ID, 9]] = 50.0
    for temperature, ignore_eos in itertools.product((0.0, 1.0), (False, True)):
        params = SamplingParams(
            temperature=temperature, min_tokens=20, max_tokens=30, stop_token_ids=[9],
            ignore_eos=ignore_eos,
        )  # fmt: skip
        for num_output in (0, 1, 19):
            token = sample_one(logits, params, tokens=[*PROMPT, *[4] * num_output])
            assert token not in (END_ID, 9)
        assert sample_one(logits, params, tokens=[*PROMPT, *[4] * 20]) in (END_ID, 9)


def test_ignore_eos_bans_no_end_id() -> None:
    """cases 26: it means not stopping there, and the scheduler does that."""
    logits = torch.zeros(VOCAB_SIZE)
    logits[END_ID] = 50.0

    assert sample_one(logits, SamplingParams(temperature=0, ignore_eos=True)) == END_ID


def test_where_all_is_banned_the_best_allowed_token_comes_all_the_same() -> None:
    logits = torch.tensor([9.0, 1.0, 5.0, 5.0, 0.0])
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, allowed_token_ids=[END_ID, 3, 4], bad_word_ids=[[3], [4]],
            min_tokens=9, top_p=0.5,
        )  # fmt: skip
        assert sample_one(logits, params) == 2
    every_id = SamplingParams(temperature=1.0, bad_word_ids=[[token] for token in range(5)])
    assert sample_one(logits, every_id) == 0


@pytest.mark.parametrize("params", [FEATURES[0], FEATURES[1], FEATURES[2], FEATURES[8]])
def test_a_row_that_the_model_rules_out_whole_gives_id_0(params: SamplingParams) -> None:
    assert sample_one(torch.full((200,), -torch.inf), params) == 0


def test_tokens_that_the_model_rules_out_are_never_drawn() -> None:
    logits = torch.full((500,), -torch.inf)
    logits[[17, 400]] = torch.tensor([0.0, 1.0])
    for seed in range(100):
        params = SamplingParams(seed=seed, temperature=2.0, top_k=seed % 3 * 40)
        assert sample_one(logits, params) in (17, 400)


@pytest.mark.parametrize("params", [FEATURES[0], FEATURES[1], FEATURES[2], FEATURES[6]])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
def test_unusable_logits_are_refused_and_the_slots_named(
    value: float, params: SamplingParams
) -> None:
    sampler = Sampler(9, 300, "cpu")
    for slot in (8, 2, 5):
        sampler.admit(admission(slot, params))
    logits = torch.stack([logits_of(300, seed) for seed in range(3)])
    logits[1, 299] = value

    with pytest.raises(BadLogits, match="slot 2: ") as refused:
        sampler.sample(logits, int32([8, 2, 5]), int32([7, 7, 7]), log_of(PROMPT + OUTPUT, 9))

    assert refused.value.slots == (2,)


# --- log-probabilities ------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_and_only_of_rows_that_ask() -> None:
    """cases 16: whatever the filters, the numbers are the model's own."""
    logits = torch.stack([logits_of(VOCAB_SIZE, seed) for seed in range(3)])
    sampler = Sampler(3, VOCAB_SIZE, "cpu")
    sampler.admit(admission(0, SamplingParams(temperature=0)))
    sampler.admit(admission(1, SamplingParams(allowed_token_ids=[6], temperature=0.5, logprobs=2)))
    sampler.admit(admission(2, SamplingParams(temperature=0, logprobs=0)))

    found = sampler.sample(
        logits, int32([0, 1, 2]), int32([7, 5, 9]), log_of([0] * 9, 3), rows=int32([4, 6, 7])
    )

    rows = found.logprobs
    assert rows is not None
    reference = logits.double().log_softmax(dim=-1)
    best = reference[1].argsort(descending=True)[:2].tolist()
    assert rows.row.tolist() == [6, 7]
    assert rows.position.tolist() == [5, 9]
    assert rows.token.reshape(2, 3).tolist() == [[6, *best], [int(logits[2].argmax()), -1, -1]]
    assert rows.logprob.reshape(2, 3)[0].tolist() == pytest.approx(
        reference[1][[6, *best]].tolist(), abs=2e-6
    )
    assert rows.rank.tolist() == [1 + int((logits[1] > logits[1, 6]).sum()), 1]


def test_a_logprob_row_belongs_to_the_token_that_was_drawn() -> None:
    sampler = Sampler(50, 300, "cpu")
    for slot in range(50):
        sampler.admit(admission(slot, SamplingParams(logprobs=20, temperature=1.5)))
    logits = torch.stack([logits_of(300, seed) for seed in range(50)])
    slots = np.arange(50, dtype=np.int32)

    found = sampler.sample(logits, slots, slots + int32(3), log_of(PROMPT, 50))

    assert found.logprobs is not None
    assert found.logprobs.token.reshape(50, 21)[:, 0].tolist() == found.token.tolist()


def test_an_empty_step_samples_nothing() -> None:
    found = Sampler(2, 10, "cpu").sample(
        torch.empty(0, 10), NO_INT32, NO_INT32, np.zeros((2, 4), dtype=np.int32)
    )

    assert found.token.tolist() == []
    assert found.logprobs is None


def test_misuse_of_slots_is_found() -> None:
    sampler = Sampler(2, 10, "cpu")
    sampler.admit(admission(0, SamplingParams()))

    with pytest.raises(AssertionError, match="slot 0 is admitted twice"):
        sampler.admit(admission(0, SamplingParams()))
    with pytest.raises(AssertionError, match="slot 1 is released but not held"):
        sampler.release(1)
    with pytest.raises(AssertionError, match="not admitted"):
        sampler.sample(torch.zeros(1, 10), int32([1]), int32([4]), log_of(PROMPT, 2))
