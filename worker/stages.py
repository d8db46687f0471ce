"""How a model's layers are dealt to the pipeline stages of one worker group.

Stages follow each other: each passes its hidden states on to the next one. The first has the
embedding too, the last the final norm, the output layer and the sampling; so the last stages get
the fewer layers where they cannot all have the same number. Only integers here.
"""

from dataclasses import dataclass

from worker.shards import Span, deal


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one stage of `size` holds."""

    index: int
    size: int
    layers: Span

    @property
    def is_first(self) -> bool:
        """Whether it turns tokens into hidden states."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it turns hidden states into tokens, and answers."""
        return self.index == self.size - 1


class ImpossibleStages(ValueError):
    """There are more stages than layers."""

    def __init__(self, num_layers: int, size: int) -> None:
        super().__init__(
            f"pipeline_parallel_size={size} does not fit this model of {num_layers} layers: each "
            f"stage needs one at least. Set pipeline_parallel_size to at most {num_layers}, or "
            "raise tensor_parallel_size, which cuts each layer."
        )
        self.num_layers, self.size = num_layers, size


def deal_stages(num_layers: int, size: int, head_layers: float = 0.0) -> tuple[Stage, ...]:
    """The stages of a group, in order, so that a step takes each about as long.

    Args:
        head_layers: what the output layer costs, in layers; the last stage gets fewer for it.

    Raises:
        ImpossibleStages: `size` is above `num_layers`.
    """
    if size > num_layers:
        raise ImpossibleStages(num_layers, size)
    last = max(1, int((num_layers + head_layers) / size - head_layers)) if size > 1 else num_layers
    others = deal(num_layers - last, size - 1) if size > 1 else ()
    spans = (*others, Span(num_layers - last, num_layers))
    return tuple(Stage(index=at, size=size, layers=span) for at, span in enumerate(spans))
