"""Which tokens of each row are the most probable, in one fixed order.

Higher logit first, and of equal ones the lower id, everywhere: greedy choice, top_k, top_p,
and the alternatives of log-probabilities agree. A row's answer depends on that row alone.
"""

import torch
from torch import Tensor


class BadLogits(RuntimeError):
    """The model gave logits that cannot be sampled from: NaN, or too large for float32.

    Attributes:
        slots: the slots of the sequences concerned; the other rows are sound.
    """

    def __init__(self, slots: tuple[int, ...], values: tuple[float, ...]) -> None:
        named = ", ".join(
            f"slot {slot}: {value:g}" for slot, value in zip(slots, values, strict=True)
        )
        super().__init__(
            f"the model's largest logit must be a finite number below {LARGEST:g}, got {named}. "
            "The weights may be damaged, or overflow in this dtype; try dtype float32"
        )
        self.slots = slots


LARGEST = 1e30
"""Larger logits, divided by the least temperature, would leave float32."""


def leaders(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its lowest id; NaN if the row holds one.

    Shapes:
        logits: [R, V] float
    Returns:
        values [R] in the dtype of `logits`, ids [R] int64.
    """
    if logits.device.type == "cpu":
        # numpy's argmax uses vector instructions; torch's takes ten times as long.
        ids = torch.from_numpy(logits.numpy().argmax(axis=1))
        return logits.gather(1, ids[:, None])[:, 0], ids
    values, ids = logits.max(dim=-1)
    return values, ids


def leading(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` first ids of each row, and how many of them are surely in order.

    Where the cut falls among equal logits, which of them are found is left open: only ids
    with a logit above the last one's are sure. A full width is always sure.

    Shapes:
        logits: [R, V] float, without NaN
    Returns:
        ids [R, width] int64, sure [R] int64.
    """
    vocab_size = logits.shape[1]
    if width >= vocab_size:
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
        return ids, torch.full(ids.shape[:1], vocab_size, device=ids.device)
    values, ids = logits.topk(width, dim=-1)
    ids, places = ids.sort(dim=-1)
    values, places = values.gather(1, places).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, places), (values > values[:, -1:]).sum(dim=-1)


def top(logits: Tensor, count: int) -> Tensor:
    """The `count` first ids of each row, exactly.

    Shapes:
        logits: [R, V] float, without NaN; `count` at most V
    Returns:
        ids [R, count] int64.
    """
    ids, sure = leading(logits, min(2 * count + 32, logits.shape[1]))
    ids = ids[:, :count].contiguous()
    cut = (sure < count).nonzero()[:, 0]
    if len(cut):
        whole, _ = leading(logits.index_select(0, cut), logits.shape[1])
        ids[cut] = whole[:, :count]
    return ids
