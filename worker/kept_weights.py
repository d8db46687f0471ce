"""How a rank comes to its weights where somebody on its host keeps them for ranks to come."""

import fcntl
from typing import Protocol

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""Of `fcntl(2)`: nothing about the memory changes any more, not even this."""


class WeightKeeper(Protocol):
    """Keeps sealed memory (`worker.weight_memory`) of one host's ranks: of each part one copy."""

    def borrow(self, part: str, form: str) -> int | None:
        """The memory with a part of the model, as a descriptor that the caller closes. None: the
        caller reads the weights itself, and may `lend` them.

        Waits while another rank is reading the same.

        Args:
            part: which layers, and which slices of them.
            form: how they are laid out in memory.
        """
        ...

    def lend(self, fd: int) -> bool:
        """Here is what `borrow` did not have, sealed. The descriptor stays the caller's.

        Returns:
            whether it is kept
        """
        ...

    def close(self) -> None:
        """Nothing of it is used, and nothing will be lent. Idempotent."""
        ...


def is_sealed(fd: int) -> bool:
    """Whether nobody can change, lengthen or shorten what is behind a descriptor."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # not a memfd
        return False
