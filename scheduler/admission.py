"""Can a request run at all, and may a waiting sequence start now."""

import math
from collections.abc import Iterable

import numpy as np

from scheduler.arrays import Int32Array
from scheduler.config import ModelLimits, SchedulerConfig
from scheduler.errors import InvalidRequest
from scheduler.group import Group
from scheduler.request import Rejection, Request
from scheduler.sampling import INT32_MAX
from scheduler.sequences import Sequence


class AdmissionRules:
    """Checks at the border: all that a client can get wrong is found here, with numbers."""

    def __init__(self, config: SchedulerConfig, model: ModelLimits) -> None:
        self._config, self._model = config, model

    def check(self, request: Request, *, is_live: bool, max_len: int) -> Rejection | None:
        """Why the request can never run; None if it can.

        `max_len` is the most tokens that any sequence can have now.
        """
        try:
            self._check_fields(request, is_live)
        except InvalidRequest as error:
            return Rejection(
                handle=request.handle, reason="invalid", message=str(error), param=error.param
            )
        num_prompt = len(request.prompt)
        if num_prompt >= max_len and not len(request.output):
            return Rejection(
                handle=request.handle,
                reason="too_long",
                message=self._too_long(num_prompt, max_len),
                param="prompt",
            )
        return None

    def _check_fields(self, request: Request, is_live: bool) -> None:
        if is_live:
            raise InvalidRequest(f"handle {request.handle} is in use", param="handle")
        if not 0 <= request.handle <= INT32_MAX:
            raise InvalidRequest(
                f"handle must be from 0 to {INT32_MAX}, got {request.handle}", param="handle"
            )
        if not len(request.prompt):
            raise InvalidRequest("the prompt is empty; it needs at least 1 token", param="prompt")
        vocab_size = self._model.vocab_size
        self._check_column("prompt", request.prompt)
        self._check_column("output", request.output)
        self._check_ids("end_ids", request.end_ids)
        request.sampling.check_vocabulary(vocab_size)
        if request.sampling.n != 1:
            raise InvalidRequest("the engine takes n=1; front ends send n requests", param="n")
        if request.sampling.seed is None and not request.sampling.is_greedy:
            raise InvalidRequest("the engine needs a seed; front ends draw one", param="seed")
        if request.priority and self._config.policy != "priority":
            raise InvalidRequest(
                f"priority={request.priority} needs the priority policy; this engine runs "
                f"scheduling_policy={self._config.policy}",
                param="priority",
            )
        if not -INT32_MAX <= request.priority <= INT32_MAX:
            raise InvalidRequest(
                f"priority must be within +-{INT32_MAX}, got {request.priority}", param="priority"
            )
        if request.cache_salt == "":
            raise InvalidRequest("cache_salt must not be empty", param="cache_salt")
        timeout_s = request.timeout_s
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
            raise InvalidRequest(f"timeout_s must be over 0, got {timeout_s}", param="timeout_s")
        if not (math.isfinite(request.age_s) and request.age_s >= 0):
            raise InvalidRequest(f"age_s must be 0 or more, got {request.age_s}", param="age_s")

    def _check_column(self, name: str, ids: Int32Array) -> None:
        if len(ids) and int(np.maximum.reduce(ids.view(np.uint32))) >= self._model.vocab_size:
            self._check_ids(name, ids.tolist())  # too large, or below 0

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        vocab_size = self._model.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{name} holds token id {token}; the model's vocabulary has ids 0 to "
                    f"{vocab_size - 1}",
                    param=name,
                )

    def _too_long(self, num_prompt: int, max_len: int) -> str:
        if max_len >= self._model.max_model_len:
            return (
                f"prompt of {num_prompt} tokens leaves no room for output: the context holds "
                f"max_model_len={self._model.max_model_len} tokens. Shorten the prompt to "
                f"{max_len - 1} tokens or fewer."
            )
        size = self._config.block_size
        return (
            f"prompt of {num_prompt} tokens needs {num_prompt // size + 1} KV blocks of {size} "
            f"tokens for itself and one output token; the largest worker group has "
            f"{max_len // size}. Shorten the prompt, or give workers more memory "
            "(gpu_memory_utilization, kv_cache_memory_bytes or num_kv_blocks)."
        )

    def has_room(self, group: Group, sequence: Sequence, cached: list[int], growth: int) -> bool:
        """Whether the group has blocks for all the sequence's tokens and some head-room.

        Head-room is for running sequences to grow into: a watermark, and the share of the
        `growth` tokens they may still need blocks for that recent preemptions have taught
        (`Group.growth_share`). A group that runs nothing needs none, so whatever fits the
        pool starts at last.
        """
        needed = group.cache.num_needed(cached, len(sequence.tokens))
        if not group.num_running:
            return needed <= group.cache.num_idle
        watermark = math.ceil(self._config.watermark * group.cache.num_blocks)
        growth += sequence.limit - len(sequence.tokens)
        reserve = max(watermark, int(growth / self._config.block_size * group.growth_share))
        return needed + reserve <= group.cache.num_idle
