"""Limits that the scheduler keeps, each with its price."""

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from scheduler.errors import ConfigError


class ModelLimits(Struct, frozen=True, kw_only=True):
    """What the model allows; the scheduler knows nothing else about it."""

    vocab_size: int
    max_model_len: int
    """Tokens that a sequence may have in all, prompt and output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step on one worker group, and of the queue before all groups."""

    max_num_batched_tokens: int = 512
    """Tokens computed per step. More: prompts start sooner, running streams stutter."""

    max_num_seqs: int = 256
    """Sequences that may hold blocks at once in a group. More: throughput, at the price of
    preemption and of longer steps."""

    block_size: int = 16
    """Tokens per KV block. More: fewer table entries, coarser prefix reuse, more waste."""

    enable_prefix_caching: bool = True

    policy: Literal["fcfs", "priority"] = "fcfs"

    priority_ageing_s: float = 10.0
    """Waiting this long is worth one level of priority, so that low ones still run."""

    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt per step. 0: up to all that is left of the step, half of what
    is left while other prompts wait. Less: short prompts pass long ones sooner."""

    max_plans_in_flight: int = 2
    """Plans dispatched but unanswered per group and its last stage. 2 keeps the device busy while
    the core plans; 1 is for debugging."""

    num_stages: int = 1
    """Pipeline stages of each group. Each one beyond the first allows another plan in flight, and
    a step takes its part of the running streams only, so that no stage waits for another."""

    watermark: float = 0.02
    """Share of the blocks that admission leaves idle for running sequences to grow into.
    More: fewer preemptions, fewer sequences at once."""

    max_head_bypasses: int = 32
    """How many smaller requests may start before a blocked first one. More: throughput, at
    the price of the blocked one's waiting time."""

    max_waiting_requests: int = 4096
    """More are refused at once. Raising it lets the queue, and so waiting times, grow."""

    max_waiting_tokens: int = 4_194_304
    """Prompt tokens in the queue above which requests are refused at once."""

    max_queue_s: float | None = None
    """Requests that would wait longer than this for their turn are refused at once. None: the
    two counts alone bound the queue. More: fewer refusals, later first tokens."""

    poison_after: int = 2
    """Failures of a group, with no progress in between, after which a request that was in each of
    the steps that failed is given up. 0: never. More: innocent ones are safer, a request that
    breaks kernels does more harm."""

    exclusive_phases: bool = False
    """A step holds prompts or running streams, never both, prompts first: for comparing with
    engines that work so."""

    @property
    def most_unanswered(self) -> int:
        """Plans of a group that may be in flight."""
        return self.max_plans_in_flight + self.num_stages - 1

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "block_size",
            "num_stages",
            "max_waiting_requests",
            "max_waiting_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: each running sequence needs one token per "
                "step. Raise the first or lower the second."
            )
        if self.max_plans_in_flight not in (1, 2):
            raise ConfigError(f"max_plans_in_flight must be 1 or 2, got {self.max_plans_in_flight}")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.max_queue_s is not None and not self.max_queue_s >= 0.0:
            raise ConfigError(f"max_queue_s must not be negative, got {self.max_queue_s}")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")
        if self.priority_ageing_s <= 0:
            raise ConfigError(f"priority_ageing_s must be over 0, got {self.priority_ageing_s}")
        if self.poison_after < 0:
            raise ConfigError(f"poison_after must not be negative, got {self.poison_after}")
        if self.long_prefill_token_threshold < 0 or self.max_head_bypasses < 0:
            raise ConfigError(
                "long_prefill_token_threshold and max_head_bypasses must not be negative, got "
                f"{self.long_prefill_token_threshold} and {self.max_head_bypasses}"
            )
