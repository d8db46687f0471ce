"""What can be said of a model before any worker starts, from its config.json alone.

Workers read the file in full and check all of it; this says at once what would make every
one of them fail after seconds of loading libraries.
"""

import json
from pathlib import Path

from scheduler.errors import ConfigError
from worker.errors import ModelError, UnsupportedModel
from worker.models.registry import find_architecture
from worker.models.spec import context_of, read_spec
from worker.shards import ImpossibleShards, ModelWidths, deal_shards
from worker.stages import ImpossibleStages, deal_stages

_WIDTHS = ("num_attention_heads", "intermediate_size", "vocab_size", "num_hidden_layers")


def check_model(
    model_dir: Path,
    tensor_parallel_size: int,
    pipeline_parallel_size: int = 1,
    max_model_len: int | None = None,
) -> None:
    """Check the architecture, whether the model can be dealt out to so many ranks, and its context.

    A file that cannot be read is left to the workers, whose messages say more.

    Raises:
        ConfigError: it will not do; the message says what would.
    """
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
        architectures = [str(name) for name in config["architectures"]]
        heads, columns, rows, layers = (int(config[name]) for name in _WIDTHS)
        kv_heads = int(config.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    try:
        find_architecture(architectures)
        widths = ModelWidths(
            num_q_heads=heads, num_kv_heads=kv_heads, mlp_columns=columns, vocab_rows=rows
        )
        deal_shards(widths, tensor_parallel_size)
        deal_stages(layers, pipeline_parallel_size)
    except (UnsupportedModel, ImpossibleShards, ImpossibleStages) as error:
        raise ConfigError(f"{model_dir}: {error}") from error
    try:
        spec = read_spec(model_dir)
    except UnsupportedModel as error:
        raise ConfigError(f"{model_dir}: {error}") from error
    except ModelError:
        return
    try:
        context_of(spec, max_model_len, model_dir)
    except ModelError as error:
        raise ConfigError(str(error)) from error
