"""``headrace keys``: adds, lists, revokes and checks the keys of a key file."""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace import Command, ConfigError, HeadraceError, draw_table, one_line
from headrace_access.key_file import KeyFile, Principal, load_document, new_key, parse_patterns

#: What a new principal may do, unless the command says more.
_OPERATIONS = "inference,metadata,model-config"


class AccessKeys(Command):
    name = "keys"
    help = "add, list, revoke and check access keys"
    synopsis = "add FILE PRINCIPAL [options] | list FILE | revoke FILE KEY-ID | check FILE [options]"
    description = (
        "Change the key file of --access-keys. A running server uses the changed file within a second. "
        "'add' prints the new key once: the file has its digest only."
    )
    example = "headrace keys add access.json alice --models 'digits*' --expires 2027-01-31"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", choices=("add", "list", "revoke", "check"))
        parser.add_argument("file", help="the key file; 'add' creates it")
        parser.add_argument(
            "subject", nargs="?", default="", help="the principal to add, or the id of the key to revoke"
        )
        parser.add_argument("--models", default=None, help="models that the principal may use, such as 'a,digits*'")
        parser.add_argument("--operations", default=None, help=f"operations or categories; {_OPERATIONS} by default")
        parser.add_argument("--expires", default=None, metavar="DAY", help="the first day without the key: 2027-01-31")
        parser.add_argument("--note", default=None, help="where the key is used, for 'list'")
        parser.add_argument("--key", default=None, help="for 'check': a key, or - to read it from stdin")

    def run(self, arguments: argparse.Namespace) -> int:
        actions = {"add": add, "list": show, "revoke": revoke, "check": check}
        try:
            return actions[arguments.action](arguments)
        except (HeadraceError, ValueError) as error:
            told = error.message if isinstance(error, HeadraceError) else str(error)
        except OSError as error:
            told = f"{error.filename}: {error.strerror}"
        print(f"headrace keys: {one_line(told)}", file=sys.stderr)
        return 1


def add(arguments: argparse.Namespace) -> int:
    """Add a key for a principal, and the principal if it is new. Print the key."""
    if not arguments.subject:
        raise ValueError("name the principal: headrace keys add FILE PRINCIPAL")
    key, key_id, digest = new_key()
    with changed(Path(arguments.file)) as document:
        principals = document["principals"]
        principal = principals.setdefault(arguments.subject, {"keys": {}, "allow": []})
        if arguments.models is not None or arguments.operations is not None or not principal["allow"]:
            models = parse_patterns("*" if arguments.models is None else arguments.models, "--models")
            named = _OPERATIONS if arguments.operations is None else arguments.operations
            operations = parse_patterns(named, "--operations")
            principal["allow"] = [{"models": list(models), "operations": list(operations)}]
        entry = {"sha256": digest, "created": datetime.date.today().isoformat()}
        entry |= {name: value for name in ("expires", "note") if (value := getattr(arguments, name)) is not None}
        principal.setdefault("keys", {})[key_id] = entry
    print(key)
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the principals and their keys, without secrets."""
    document = load_document(Path(arguments.file))
    KeyFile.parse(document, Path(arguments.file))
    rows = [
        [
            name,
            key_id,
            key.get("created", ""),
            key.get("expires", ""),
            "; ".join(f"{','.join(rule['operations'])} on {','.join(rule['models'])}" for rule in principal["allow"]),
            one_line(str(key.get("note", ""))),
        ]
        for name, principal in document["principals"].items()
        for key_id, key in (principal.get("keys") or {"-": {}}).items()
    ]
    print(draw_table(["Principal", "Key", "Created", "Expires", "Allowed", "Note"], rows))
    return 0


def revoke(arguments: argparse.Namespace) -> int:
    """Remove a key. A whole key is accepted, too, so that a leaked one can be pasted."""
    key_id = arguments.subject.removeprefix("hr_").partition("_")[0]
    with changed(Path(arguments.file)) as document:
        owners = [name for name, each in document["principals"].items() if key_id in each.get("keys", {})]
        if not owners:
            raise ConfigError(f"there is no key '{one_line(key_id)}' in '{arguments.file}'")
        del document["principals"][owners[0]]["keys"][key_id]
    print(f"key '{key_id}' of '{owners[0]}' is revoked")
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Check the file; and what a key may do, if one is given."""
    keys = KeyFile.read(Path(arguments.file))
    if arguments.key is None:
        print(f"'{arguments.file}' is valid: {len(keys)} keys")
        return 0
    given = sys.stdin.readline().strip() if arguments.key == "-" else arguments.key
    found = keys.find(given)
    if not isinstance(found, Principal):
        print(f"headrace keys: the key is refused: {found}", file=sys.stderr)
        return 1
    allowed = "; ".join(f"{','.join(rule.operations)} on {','.join(rule.models)}" for rule in found.rules)
    print(f"the key belongs to '{found.name}', who may: {allowed or 'nothing'}")
    return 0


@contextmanager
def changed(path: Path) -> Iterator[dict[str, Any]]:
    """Return the document of ``path``, or an empty one. Write it at the end, in one step, if it is valid.

    A lock beside the file keeps two commands from losing the change of one.
    """
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        document = load_document(path) if path.exists() else {"principals": {}}
        yield document
        KeyFile.parse(document, path)
        partial = path.with_name(f".{path.name}.partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
