"""What tests ask of a running cluster."""

import time

from cluster.messages.reports import Status
from stoker import Client, RequestOutput, SamplingParams
from tests.system.in_process import Answer

SETTLE_S = 20.0


def settled(client: Client, num_clients: int | None = None) -> Status:
    """The status once nothing waits or runs and no block is held, which must be soon.

    Args:
        num_clients: who shall be there by then; None: whoever is.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        status = client.status()
        held = sum(group.num_used_blocks for group in status.groups)
        has_left = num_clients is None or status.num_clients == num_clients
        if has_left and status.num_running == status.num_waiting == held == 0:
            return status
        assert time.monotonic() < deadline, f"still at work: {status}"


def greedy(max_tokens: int = 8, **asked: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **asked)


def tokens_of(output: RequestOutput) -> list[int]:
    (only,) = output.outputs
    return only.token_ids


def text_of(output: RequestOutput) -> str:
    (only,) = output.outputs
    return only.text


def as_answer(output: RequestOutput, sampling: SamplingParams) -> Answer:
    """As the oracle judges it; log-probabilities by the position of their token."""
    (only,) = output.outputs
    first = len(output.prompt_token_ids)
    rows = dict(enumerate(only.logprobs or [], first))
    rows |= {at: row for at, row in enumerate(output.prompt_logprobs or []) if row is not None}
    return Answer(
        prompt=output.prompt_token_ids,
        sampling=sampling,
        tokens=only.token_ids,
        logprobs={
            at: {token: one.logprob for token, one in row.items()} for at, row in rows.items()
        },
    )
