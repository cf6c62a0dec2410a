"""``headrace keys``: changes an access file, and prints the rights of a key or a token."""

from __future__ import annotations

import argparse
import sys

from headrace import Command, HeadraceError, one_line
from headrace_access.access_rules import OPERATIONS_OF_NEW


class AccessKeys(Command):
    name = "keys"
    help = "add, list, revoke and check access keys"
    synopsis = (
        "add FILE PRINCIPAL [options] | allow FILE PRINCIPAL [options] | deny FILE PRINCIPAL [options] | "
        "list FILE | revoke FILE KEY-ID | check FILE [options]"
    )
    description = (
        "Change the file of --access-keys. A running server uses the changed file within two seconds. "
        "'add' prints the new key once: the file stores only its digest. 'allow' adds a rule, 'deny' removes rules. "
        "'check' prints the rights of a key or a token, or why it is refused."
    )
    example = "headrace keys add access.json alice --models 'digits*' --expires 2027-01-31"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", choices=("add", "allow", "deny", "list", "revoke", "check"))
        parser.add_argument("file", help="the access file; 'add' and 'allow' create it")
        parser.add_argument("subject", nargs="?", default="", help="the principal, or the id of the key to revoke")
        parser.add_argument("--models", default=None, help="patterns of models, such as 'a,digits*' (default: *)")
        parser.add_argument(
            "--operations", default=None, help=f"operations or categories (default: {OPERATIONS_OF_NEW})"
        )
        parser.add_argument("--role", action="store_true", help="for 'allow' and 'deny': PRINCIPAL is a role")
        parser.add_argument("--roles", default=None, help="for 'add': the roles of the principal, such as 'a,b'")
        parser.add_argument(
            "--expires",
            default=None,
            metavar="DAY",
            help="the first day without the key: 2027-01-31",
        )
        parser.add_argument("--note", default=None, help="a remark on the key, which 'list' prints")
        parser.add_argument("--key", default=None, help="for 'check': a key or a token, or - to read it from stdin")

    def run(self, arguments: argparse.Namespace) -> int:
        from headrace_access.key_actions import ACTIONS

        try:
            return ACTIONS[arguments.action](arguments)
        except (HeadraceError, ValueError) as error:
            message = error.message if isinstance(error, HeadraceError) else str(error)
        except OSError as error:
            message = f"{error.filename}: {error.strerror}"
        print(f"headrace keys: {one_line(message)}", file=sys.stderr)
        return 1
