"""``headrace traffic``: shows and changes the split of requests by a router of a running server.

::

    headrace traffic show canary
    headrace traffic set canary digits:1=80 digits:2=20 --shadow 0.5
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from headrace import ServerCommand, one_line


class TrafficCommand(ServerCommand):
    name = "traffic"
    help = "show and change how a router splits its requests"
    synopsis = "[options] show <model> | set <model> <target>=<weight>..."
    description = "Show or change the split of requests by a router of a running server."
    example = "headrace traffic set canary digits:1=80 digits:2=20"
    path = "traffic"
    restricted = "the change is"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=("show", "set"), help="show or set the split")
        parser.add_argument("model", help="the router's name")
        parser.add_argument(
            "weights", nargs="*", type=_weight, metavar="TARGET=WEIGHT", help="for set: the weight of each target"
        )
        parser.add_argument(
            "--shadow",
            type=_number,
            metavar="FRACTION",
            help="for set: the fraction of requests that are copied to the shadow, 0 to 1",
        )
        self.add_server_arguments(parser)

    def change(self, arguments: Namespace) -> Mapping[str, Any] | None:
        weights = dict(arguments.weights)
        change = {"weights": weights} if weights else {}
        change |= {} if arguments.shadow is None else {"shadow": arguments.shadow}
        if len(weights) < len(arguments.weights):
            raise ValueError("a target is named twice")
        if arguments.action == "show" and change:
            raise ValueError("'show' changes nothing: use 'set' for weights and --shadow")
        if arguments.action == "set" and not change:
            raise ValueError("'set' needs a weight for each target, such as digits:1=80 digits:2=20, or --shadow")
        return change or None

    def picture(self, document: Mapping[str, Any], arguments: Namespace) -> Iterable[str]:
        from headrace_router.traffic_picture import picture

        return picture(document)


def _weight(text: str) -> tuple[str, float]:
    target, equals, number = text.rpartition("=")
    if not equals or not target.strip():
        raise ArgumentTypeError(f"'{one_line(text)}' is no TARGET=WEIGHT, such as digits:2=10")
    return target.strip(), _number(number)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"'{one_line(text)}' is no number") from None
