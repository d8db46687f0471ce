"""How much fits into a step, and how long a step takes."""

from scheduler.config import SchedulerConfig

_LEAST_SHARE = 1 / 64
"""Of a step. More: fewer tiny slices, each of which costs as much of the core's time as a large
one; less: shorter prompts find room in a step that is nearly full."""


class StepBudget:
    """Tokens left in the step being planned, dealt out to prompts one after the other."""

    def __init__(self, config: SchedulerConfig, spent: int) -> None:
        self._threshold = config.long_prefill_token_threshold
        self._least = int(_LEAST_SHARE * config.max_num_batched_tokens)
        self.left = config.max_num_batched_tokens - spent

    def share(self, wanted: int, *, others_wait: bool) -> int:
        """Tokens for one prompt that wants `wanted`.

        While other prompts wait, a long one takes half of what is left, so that short ones
        behind it start in the same step (cases: a long prefill starves short prompts); no prompt
        is given less than 1/64 of a step while there is so much.
        """
        most = self.left
        if self._threshold:
            most = min(most, self._threshold)
        elif others_wait:
            most = min(most, max(-(-most // 2), self._least))
        return min(wanted, most)

    def spend(self, count: int) -> None:
        assert 0 <= count <= self.left
        self.left -= count

    def top_up(self, wanted: int, taken: int) -> int:
        """More tokens for a prompt that took `taken`, once nobody else wants the rest."""
        most = self.left
        if self._threshold:
            most = min(most, self._threshold - taken)
        return max(0, min(wanted - taken, most))


class StepTime:
    """Predicts the seconds of a step from its tokens: a fixed part and a part per token.

    Least squares over the last steps, older ones fading by 5% each.
    """

    _KEEP = 0.95

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, num_tokens: int, seconds: float) -> None:
        keep = self._KEEP
        self._n = self._n * keep + 1.0
        self._x = self._x * keep + num_tokens
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + num_tokens * num_tokens
        self._xy = self._xy * keep + num_tokens * seconds

    @property
    def mean_s(self) -> float:
        """Seconds of the last steps on average; 0 before the first one."""
        return self._y / self._n if self._n else 0.0

    def predict(self, num_tokens: int) -> float:
        """Seconds; 0 before the first step was measured."""
        if self._n == 0.0:
            return 0.0
        spread = self._xx - self._x * self._x / self._n
        mean_x, mean_y = self._x / self._n, self._y / self._n
        if spread < 1e-6 * self._xx:
            return mean_y
        slope = max(0.0, (self._xy - self._x * self._y / self._n) / spread)
        return max(0.0, mean_y + slope * (num_tokens - mean_x))
