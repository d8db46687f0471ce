"""Which cores each rank of a host may run on."""

from collections.abc import Sequence


def deal_cores(cores: Sequence[int], num_shares: int) -> tuple[tuple[int, ...], ...]:
    """Deal cores out as evenly as they go, neighbours together, the first shares the larger.

    With more shares than cores, each share is one core and cores are shared in turn.
    """
    if num_shares < 1 or not cores:
        raise ValueError(f"cannot deal {len(cores)} cores to {num_shares} shares")
    if num_shares > len(cores):
        return tuple((cores[share % len(cores)],) for share in range(num_shares))
    size, larger = divmod(len(cores), num_shares)
    shares = []
    first = 0
    for share in range(num_shares):
        count = size + (share < larger)
        shares.append(tuple(cores[first : first + count]))
        first += count
    return tuple(shares)
