"""``headrace quotas``: checks a quota file, and prints the limits of a principal and a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace import Command, HeadraceError, draw_table, one_line
from headrace_quotas.quota_file import Quota, QuotaBook, QuotaLimits, Sharing

_UNITS = {
    "requests_per_second": "{:g} requests per second, {:g} at once",
    "input_bytes_per_second": "{:g} input bytes per second, {:g} at once",
    "output_tokens_per_minute": "{:g} output tokens per minute, {:g} at once",
}


class QuotasCommand(Command):
    name = "quotas"
    help = "check a quota file, and print the limits of a principal"
    synopsis = "check FILE [--principal NAME | --anonymous] [--model NAME]"
    description = "Check the file of --quota-file. With --principal, print its limits and their places in the file."
    example = "headrace quotas check quotas.json --principal alice --model digits"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", choices=("check",))
        parser.add_argument("file", help="the quota file")
        who = parser.add_mutually_exclusive_group()
        who.add_argument("--principal", default=None, help="print the limits of this principal")
        who.add_argument("--anonymous", action="store_true", help="print the limits of callers without a principal")
        parser.add_argument("--model", default="", help="also print the limits for this model")
        parser.add_argument("--workers", type=int, default=1, help="print the share of one of N --workers (default: 1)")

    def run(self, arguments: argparse.Namespace) -> int:
        try:
            book = QuotaBook.read(Path(arguments.file))
        except HeadraceError as error:
            print(f"headrace quotas: {one_line(error.message)}", file=sys.stderr)
            return 1
        if arguments.workers < 1:
            print(f"headrace quotas: --workers is {arguments.workers}; the least is 1", file=sys.stderr)
            return 1
        if arguments.principal is None and not arguments.anonymous:
            parts = f"{len(book.named)} principals, {len(book.patterns)} patterns of principals"
            print(f"'{arguments.file}' is valid: {parts}, {len(book.sharing)} patterns of shared models")
            return 0
        book = book.divided(arguments.workers)
        quota = book.anonymous if arguments.anonymous else book.of_principal(arguments.principal)
        print(draw_table(["Of", "Limit", "From"], [list(row) for row in rows(book, quota, arguments.model)]))
        return 0


def rows(book: QuotaBook, quota: Quota, model: str) -> Iterator[tuple[str, str, str]]:
    """Yield the limits of a principal with ``quota``: the models, the limit, and its place in the file."""
    for text in describe_limits(quota.limits):
        yield "all models", text, quota.place
    found = quota.of_model(model) if model else None
    for text in describe_limits(found[1]) if found is not None else ():
        yield f"model '{one_line(model)}'", text, f"models.{one_line(found[0])}" if found is not None else ""
    sharing = book.sharing_of(model) if model else None
    if sharing is not None:
        for text in (f"shared, with the weight {quota.weight:g}", *describe_sharing(sharing)):
            yield f"model '{one_line(model)}'", text, "sharing"
    elif model:
        yield f"model '{one_line(model)}'", "not shared: requests do not wait", ""


def describe_limits(limits: QuotaLimits) -> list[str]:
    """Return each limit in words."""
    texts = [
        _UNITS[name].format(rate * 60 if name.endswith("minute") else rate, burst)
        for name, rate, burst in limits.rates()
    ]
    return texts if limits.in_flight is None else [*texts, f"{limits.in_flight} requests in flight"]


def describe_sharing(sharing: Sharing) -> list[str]:
    """Return each setting in words."""
    at_once = f"{sharing.in_flight} requests" if sharing.in_flight else "as many requests as fill the instances"
    waiting = f"{sharing.max_waiting} requests with {sharing.max_waiting_bytes} bytes"
    return [f"{at_once} at once", f"at most {waiting} wait, each for {sharing.max_wait_seconds:g} s"]
