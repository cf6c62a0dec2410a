"""The command ``headrace ray``."""

from __future__ import annotations

import argparse
import socket
import sys
from typing import Any

from headrace import Command, HeadraceError, one_line, parse_options

#: Seconds for a connection to the head of the cluster.
_CONNECT_S = 5.0


class RayCommand(Command):
    """Deploys a model repository on a running Ray cluster."""

    name = "ray"
    help = "serve a repository on a Ray cluster"
    synopsis = "--model-repository URL [options] [-- flags of headrace serve]"
    description = (
        "Deploy a model repository on the Ray cluster of this machine, by Ray Serve, and end when its replicas serve. "
        "The repository must exist on every node. 'serve status' shows the replicas, 'serve shutdown' ends them."
    )
    example = "headrace ray --model-repository=/srv/models --replicas=2"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--model-repository", action="append", required=True, metavar="URL", help="may be repeated")
        add("--replicas", type=_positive, default=1, metavar="N", help="replicas, or their minimum; default: 1")
        add("--max-replicas", type=_positive, default=None, metavar="N", help="scale up to N replicas by load")
        add(
            "--target-requests",
            type=_positive,
            default=16,
            metavar="N",
            help="with --max-replicas: the target of requests in flight per replica; default: 16",
        )
        add(
            "--models-per-replica",
            type=_positive,
            default=0,
            metavar="N",
            help="load models at their first request; keep the N most recent in each replica",
        )
        add("--cpus", type=float, default=1.0, metavar="N", help="CPUs of a replica; default: 1")
        add("--gpus", type=float, default=0.0, metavar="N", help="GPUs of a replica; default: 0")
        add("--name", default="headrace", help="the name of the application; default: headrace")
        add("--route-prefix", default="/", metavar="PATH", help="the path before /v2; default: /")
        add("--address", default="auto", help="the Ray cluster; default: the one of this machine")
        add("flags", nargs="*", metavar="FLAG", help="flags of headrace serve, after --")

    def run(self, arguments: argparse.Namespace) -> int:
        from headrace_ray.serve_application import deployment

        words = [f"--model-repository={url}" for url in arguments.model_repository]
        if arguments.models_per_replica:
            words.append("--model-control-mode=explicit")
        settings: dict[str, Any] = {"ray_actor_options": {"num_cpus": arguments.cpus, "num_gpus": arguments.gpus}}
        if arguments.max_replicas is None:
            settings["num_replicas"] = arguments.replicas
        else:
            settings["autoscaling_config"] = {
                "min_replicas": arguments.replicas,
                "max_replicas": arguments.max_replicas,
                "target_ongoing_requests": arguments.target_requests,
            }
        try:
            options = parse_options([*words, *arguments.flags])
            application = deployment(options, models_per_replica=arguments.models_per_replica, **settings)
        except (HeadraceError, ValueError) as error:
            print(getattr(error, "message", error), file=sys.stderr)
            return 1
        return _deploy(application, arguments)


def _deploy(application: object, arguments: argparse.Namespace) -> int:
    try:
        _check_address(arguments.address)
    except (OSError, OverflowError, ValueError) as error:
        print(one_line(f"cannot reach the Ray cluster '{arguments.address}': {error}"), file=sys.stderr)
        return 1
    import ray
    from ray import serve

    print(f"waiting for the Ray cluster '{one_line(arguments.address)}', for at most two minutes", file=sys.stderr)
    try:
        ray.init(address=arguments.address, log_to_driver=False, logging_level="error")
        serve.run(application, name=arguments.name, route_prefix=arguments.route_prefix)
    except (ConnectionError, RuntimeError, ValueError) as error:
        print(one_line(f"cannot deploy on the Ray cluster '{arguments.address}': {error}"), file=sys.stderr)
        return 1
    print(f"'{arguments.name}' serves on the HTTP ports of the cluster, at {arguments.route_prefix}")
    return 0


def _check_address(address: str) -> None:
    """Raise `OSError` if nothing listens at the HOST:PORT ``address``. Ray itself would retry for 80 s.

    Raises `ValueError` for an address that starts a cluster for the time of this command.
    """
    if address == "local":
        raise ValueError("a cluster that ends with this command: start one by 'ray start --head'")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isascii() and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
