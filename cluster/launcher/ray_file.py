"""What `ray up` is told of a cluster file: deploy/ray-cluster.yaml with its values filled in."""

import shlex

from cluster.launcher.cluster_file import ClusterFile

HEAD_ENVIRONMENT = {
    # Version 2 never starts the workers of Ray's provider local (seen with Ray 2.60).
    "RAY_enable_autoscaler_v2": "0",
    # A node that is cut off is given up within 15 seconds instead of a minute. Less than 3 seconds
    # for an answer would take busy nodes for dead.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
WORKER_ENVIRONMENT = {
    # `ray down` stops the head alone. So many seconds later Ray gives up on a worker, and --block
    # then ends the rest of it there.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}

NOT_SOURCE = [".*", "/build", "/models", "__pycache__"]
"""What of the source's folder stays here, as patterns of rsync; / is that folder."""


def folder_on_nodes(file: ClusterFile) -> str:
    return f"~/.stoker/{file.name}"


def ray_environment(file: ClusterFile) -> dict[str, str]:
    """What every process needs that talks with this Ray; `$HOME` is the node's."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"$HOME/.stoker/{file.name}/ray_token",
        "PATH": f"{_home(file.nodes.bin)}:$PATH",
    }


def exports(environment: dict[str, str]) -> str:
    """As the beginning of a shell's command."""
    return "export " + " ".join(f'{name}="{value}"' for name, value in environment.items())


def ray_file(file: ClusterFile, token_file: str, source: str) -> dict[str, object]:
    """The configuration; Ray reads YAML, and so its JSON.

    Args:
        token_file: path, here, of the secret of this Ray.
        source: folder, here, with Stoker's source alone; "" if nodes have Stoker.
    """
    nodes = file.nodes
    install = (
        f"python3 -m venv ~/.stoker/venv && {nodes.bin}/pip install --quiet "
        "--no-compile --constraint ~/.stoker/source/requirements.lock ~/.stoker/source"
    )
    mounts = {f"{folder_on_nodes(file)}/ray_token": token_file}
    if source:
        mounts["~/.stoker/source"] = source
    cpus = "" if nodes.num_cpus is None else f" --num-cpus={nodes.num_cpus}"
    options = f"{cpus} --disable-usage-stats " + shlex.join(nodes.ray_options)
    ray = ray_environment(file)
    return {
        "cluster_name": file.name,
        "provider": {
            "type": "local",
            "head_ip": nodes.head,
            "worker_ips": list(nodes.workers),
        },
        "auth": {"ssh_user": nodes.ssh_user, "ssh_private_key": nodes.ssh_key},
        "file_mounts": mounts,
        "rsync_exclude": NOT_SOURCE,
        "setup_commands": [f"test -x {nodes.bin}/stoker || {{ {install}; }}"] if source else [],
        "head_start_ray_commands": [
            f"{exports(ray)}; ray stop",
            f"{exports({**ray, **HEAD_ENVIRONMENT})}; ray start --head --port={nodes.ray_port} "
            f"--node-ip-address={nodes.head} --include-dashboard=false "
            f"--autoscaling-config=~/ray_bootstrap_config.yaml{options}",
        ],
        "worker_start_ray_commands": [
            f"{exports(ray)}; ray stop",
            f"{exports({**ray, **WORKER_ENVIRONMENT})}; "
            f"setsid nohup ray start --block --address=$RAY_HEAD_IP:{nodes.ray_port}{options} "
            f">{folder_on_nodes(file)}/ray.log 2>&1 </dev/null & sleep 1",
        ],
    }


def _home(path: str) -> str:
    return path.replace("~", "$HOME", 1) if path.startswith("~") else path
