"""How often one sequence holds each token, kept up as it grows."""

import numpy as np
import numpy.typing as npt

from scheduler.arrays import Int32Array


class TokenCounts:
    """The distinct tokens of a prompt and its output, with counts over the output.

    Memory and the cost of reading grow with the number of distinct tokens, not with the
    sequence; each token is counted once, when it is first seen.
    """

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._num_counted = 0
        self._place_by_id: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._in_output = np.empty(64, dtype=np.int64)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[N] the distinct tokens, in the order in which they were counted."""
        return self._ids[: len(self._place_by_id)]

    @property
    def in_output(self) -> npt.NDArray[np.int64]:
        """[N] how often each stands in the output; 0 for those of the prompt alone."""
        return self._in_output[: len(self._place_by_id)]

    def count_up_to(self, end: int, tokens: Int32Array) -> None:
        """Count `tokens[:end]`, of which those counted before must not have changed."""
        assert end >= self._num_counted, f"{self._num_counted} tokens are counted, not {end}"
        middle = min(max(self._num_prompt, self._num_counted), end)
        for token in np.unique(tokens[self._num_counted : middle]).tolist():
            self._place(token)
        for token in tokens[middle:end].tolist():
            place = self._place(token)  # first: it may replace the column
            self._in_output[place] += 1
        self._num_counted = end

    def _place(self, token: int) -> int:
        place = self._place_by_id.get(token)
        if place is None:
            place = self._place_by_id[token] = len(self._place_by_id)
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place)
                self._in_output = np.resize(self._in_output, len(self._ids))
            self._ids[place] = token
            self._in_output[place] = 0
        return place
