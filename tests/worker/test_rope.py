"""Rotary tables against transformers' own angles."""

import pytest
import torch

from tests.worker.tiny_models import ROPES, llama
from worker.models.rope import rope_table
from worker.models.rope_spec import RopeSpec


def oracle(kind: str, num_positions: int) -> torch.Tensor:
    """[num_positions, head_dim]: cosines, then sines, as one forward pass sees them."""
    rotary = llama(kind).model.rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


def table(kind: str, num_positions: int) -> torch.Tensor:
    words = dict(ROPES[kind])
    original = int(str(words.pop("original_max_position_embeddings", 256)))
    for name in ("short_factor", "long_factor"):
        if name in words:
            words[name] = tuple(words[name])  # type: ignore[arg-type]  # lists in the fixture
    spec = RopeSpec(
        kind=str(words.pop("rope_type")),
        theta=float(str(words.pop("rope_theta"))),
        original_max_positions=original,
        **words,  # type: ignore[arg-type]  # the remaining names are the spec's own
    )
    return rope_table(spec, 16, num_positions)


@pytest.mark.parametrize("kind", ROPES)
def test_every_scaling_has_the_angles_of_transformers(kind: str) -> None:
    torch.testing.assert_close(table(kind, 256), oracle(kind, 256), atol=2e-6, rtol=0)


def test_longrope_uses_short_factors_if_all_positions_fit_the_trained_context() -> None:
    torch.testing.assert_close(table("longrope", 32), oracle("longrope", 32), atol=2e-6, rtol=0)
    assert not torch.allclose(table("longrope", 33)[:32], table("longrope", 32))


def test_dynamic_angles_of_a_position_do_not_depend_on_the_table_length() -> None:
    long = table("dynamic", 400)

    torch.testing.assert_close(long[:300], table("dynamic", 300), atol=0, rtol=0)
    torch.testing.assert_close(long[:256], oracle("default", 256), atol=2e-6, rtol=0)


@pytest.mark.parametrize("position", [256, 300, 399])
def test_dynamic_angles_beyond_the_trained_context_are_those_of_the_last_token(
    position: int,
) -> None:
    expected = oracle("dynamic", position + 1)[position]

    torch.testing.assert_close(table("dynamic", 400)[position], expected, atol=1e-4, rtol=0)
