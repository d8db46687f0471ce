"""`stoker plan`: what of a model fits where, without starting anything."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import load_config
from cluster.gpus import GPUS
from cluster.plan_targets import PlannedModel, find_machine, find_model
from cluster.planning import Fit, GroupPlan, Layout, Machine, Planner, choose, resolved_for
from stoker.cli import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 160
"""Columns of output into a file."""

ASKED_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "num_groups")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked beside the model and the settings of a cluster."""
    machine = parser.add_argument_group("machine (default: this one)")
    known = ", ".join(gpu.name for gpu in GPUS)
    machine.add_argument("--gpu", metavar="NAME", help=f"one of {known}")
    machine.add_argument(
        "--gpu-memory-gib", type=float, metavar="X", help="of each GPU; for one not named above"
    )
    machine.add_argument("--nodes", type=int, default=1, metavar="N", help="equal ones; default 1")
    machine.add_argument("--gpus-per-node", type=int, metavar="N", help="default: 1, or those here")
    machine.add_argument(
        "--host-memory-gib", type=float, metavar="X", help="free on each node, for CPU ranks"
    )
    requests = parser.add_argument_group("requests")
    for option, default in (("--input-len", 1024), ("--output-len", 256)):
        requests.add_argument(
            option, type=int, default=default, metavar="N", help=f"tokens; default {default}"
        )
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan; fails if nothing that was asked for works."""
    config = load_config(arguments)
    model = find_model(config.model, Path(config.models_dir))
    machine = find_machine(
        config,
        gpu=arguments.gpu,
        gpu_memory_gib=arguments.gpu_memory_gib,
        num_nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        host_memory_gib=arguments.host_memory_gib,
    )
    planner = Planner(model.spec, resolved_for(config, machine), machine)
    given = [getattr(arguments, name, None) for name in ASKED_SIZES]
    if any(given):
        tensor, pipeline, groups = (size or 1 for size in given)
        layout = Layout(
            tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, num_groups=groups
        )
        chosen: GroupPlan | None = planner.plan(layout)
    else:
        chosen = choose(planner)
    num_tokens = arguments.input_len + arguments.output_len
    others = [planner.plan(layout) for layout in planner.layouts()]
    fits = [planner.fit(each, num_tokens) if each.works else None for each in others]
    chosen_fit = planner.fit(chosen, num_tokens) if chosen is not None and chosen.works else None
    if arguments.json:
        document = {
            "model": _model_fields(model, planner),
            "machine": _machine_fields(machine),
            "request_tokens": num_tokens,
            "chosen": None if chosen is None else _plan_fields(chosen, chosen_fit, is_full=True),
            "layouts": [_plan_fields(each, fit) for each, fit in zip(others, fits, strict=True)],
        }
        print(json.dumps(document, indent=2))
    else:
        _print_heading(model, planner, machine)
        if chosen is not None:
            _print_chosen(chosen, chosen_fit, num_tokens)
        _print_layouts(others, fits, num_tokens)
    return EXIT_OK if chosen_fit is not None else EXIT_FAILED


def _model_fields(model: PlannedModel, planner: Planner) -> dict[str, object]:
    return {
        "name": model.name,
        "architecture": model.spec.architecture,
        "num_parameters": model.num_parameters,
        "file_bytes": model.file_bytes,
        "dtype": planner.form.dtype,
        "kv_cache_dtype": planner.form.kv_dtype,
        "max_model_len": planner.max_model_len,
    }


def _machine_fields(machine: Machine) -> dict[str, object]:
    return {
        "name": machine.name,
        "num_nodes": machine.num_nodes,
        "slots_per_node": machine.slots_per_node,
        "gpu_memory_bytes": machine.gpu.memory_bytes if machine.gpu else None,
        "host_free_bytes": machine.host_bytes or None,
    }


def _plan_fields(plan: GroupPlan, fit: Fit | None, *, is_full: bool = False) -> dict[str, object]:
    layout = plan.layout
    fields: dict[str, object] = {name: getattr(layout, name) for name in ASKED_SIZES}
    fields |= {"works": plan.works, "problem": plan.problem, "num_blocks": plan.num_blocks}
    if fit is not None:
        fields |= {
            "largest_context": fit.largest_context,
            "requests_at_once": fit.num_requests,
            "limit_stream_tokens_per_s": round(fit.stream_tokens_per_s, 1) or None,
            "limit_group_tokens_per_s": round(fit.group_tokens_per_s, 1) or None,
        }
    if is_full:
        fields["ranks"] = [
            {
                "rank": rank.rank,
                "layers": [rank.stage.layers.start, rank.stage.layers.stop],
                "query_heads": rank.shard.q_heads.size,
                "kv_heads": rank.shard.kv_heads.size,
                "weight_bytes": rank.weight_bytes,
                "activation_bytes": rank.activation_bytes,
                "token_bytes": rank.geometry.token_bytes,
                "block_bytes": rank.geometry.block_bytes,
                "free_bytes": rank.free_bytes,
                "num_blocks": rank.num_blocks,
            }
            for rank in plan.ranks
        ]
    return fields


def _print_heading(model: PlannedModel, planner: Planner, machine: Machine) -> None:
    spec, form = model.spec, planner.form
    files = f", {_size(model.file_bytes)} of files" if model.file_bytes else ", no files here"
    weights = f"int8 from {form.dtype}" if form.is_int8 else form.dtype
    print(
        f"{model.name}: {model.num_parameters / 1e6:,.1f} million parameters{files}\n"
        f"  {spec.num_layers} layers, {spec.num_heads} query and {spec.num_kv_heads} KV heads of "
        f"{spec.head_dim}, vocabulary of {spec.vocab_size}\n"
        f"  weights {weights}, K/V {form.kv_dtype}, context {planner.max_model_len} tokens"
    )
    if machine.gpu is not None:
        each = f"{machine.slots_per_node} x {machine.name}, {_size(machine.gpu.memory_bytes)} each"
    else:
        each = f"{machine.name}, {machine.slots_per_node} cores, {_size(machine.host_bytes)} free"
    nodes = f"{machine.num_nodes} nodes of " if machine.num_nodes > 1 else ""
    print(f"on {nodes}{each}\n")


def _print_chosen(plan: GroupPlan, fit: Fit | None, num_tokens: int) -> None:
    from rich.table import Table

    print(_layout_text(plan.layout))
    if not plan.works:
        print(f"  does not work: {plan.problem}")
    if plan.ranks:
        table = Table("rank", "layers", "heads", "weights", "step", "K/V per token", "blocks")
        for rank in plan.ranks:
            layers, heads = rank.stage.layers, rank.shard
            table.add_row(
                str(rank.rank),
                f"{layers.start}-{layers.stop - 1}",
                f"{heads.q_heads.size}/{heads.kv_heads.size}",
                _size(rank.weight_bytes),
                _size(rank.activation_bytes),
                f"{rank.geometry.token_bytes:,} B",
                str(rank.num_blocks),
            )
        _print_table(table)
    if fit is not None:
        block_size = plan.ranks[0].geometry.block_size
        print(
            f"  each group: {plan.num_blocks} blocks of {block_size} tokens, contexts up to "
            f"{fit.largest_context}, {fit.num_requests} requests of {num_tokens} tokens at once"
        )
        if fit.group_tokens_per_s:
            print(
                f"  limit by memory and arithmetic: {fit.stream_tokens_per_s:,.0f} tokens/s for "
                f"one stream, {fit.group_tokens_per_s:,.0f} for {fit.num_requests}; real "
                "figures are below it"
            )
    print()


def _print_layouts(plans: list[GroupPlan], fits: list[Fit | None], num_tokens: int) -> None:
    from rich.table import Table

    table = Table("TP", "PP", "groups", "blocks", f"at once x {num_tokens}", "limit tokens/s", "")
    for plan, fit in zip(plans, fits, strict=True):
        layout = plan.layout
        sizes = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.num_groups)
        row = [str(size) for size in sizes]
        if fit is None:
            row += ["", "", "", plan.problem]
        else:
            rate = fit.group_tokens_per_s * layout.num_groups
            requests = fit.num_requests * layout.num_groups
            row += [str(plan.num_blocks), str(requests), f"{rate:,.0f}" if rate else "", "works"]
        table.add_row(*row)
    print("What the machine could run, with as many groups as there is room for:")
    _print_table(table)


def _print_table(table: "Table") -> None:
    """In full where the output is no terminal, whose width would be a guess."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def _layout_text(layout: Layout) -> str:
    groups = "1 group" if layout.num_groups == 1 else f"{layout.num_groups} groups"
    return (
        f"{groups} of tensor_parallel_size={layout.tensor_parallel_size}, "
        f"pipeline_parallel_size={layout.pipeline_parallel_size}:"
    )


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.2f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"
