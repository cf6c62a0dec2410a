"""The actions of ``headrace keys``. Each prints its result and returns the exit code."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace import ConfigError, Operation, draw_table, one_line
from headrace_access.access_rules import OPERATIONS_OF_NEW, AccessRule, Principal, Verified, parse_patterns
from headrace_access.file_updates import changed
from headrace_access.key_file import Key, KeyFile, load_document, new_key
from headrace_access.key_sets import KeySet, read_address
from headrace_access.tokens import Tokens, decode_unverified

#: The claims that `check` shows as times.
_TIMES = ("exp", "nbf", "iat")


def add(arguments: argparse.Namespace) -> int:
    """Add a key for a principal, and the principal if it is new. Print the key."""
    with changed(Path(arguments.file)) as document:
        key, key_id, digest = new_key(
            {each for owner in document["principals"].values() for each in owner.get("keys", ())}
        )
        principal = document["principals"].setdefault(_subject(arguments), {"keys": {}, "allow": []})
        if arguments.roles is not None:
            principal["roles"] = [each.strip() for each in arguments.roles.split(",")]
        is_new = not principal.get("allow") and not principal.get("roles")
        if arguments.models is not None or arguments.operations is not None or is_new:
            principal["allow"] = [_rule(arguments)]
        entry = {"sha256": digest, "created": datetime.date.today().isoformat()}
        entry |= {name: value for name in ("expires", "note") if (value := getattr(arguments, name)) is not None}
        principal.setdefault("keys", {})[key_id] = entry
    print(key)
    return 0


def allow(arguments: argparse.Namespace) -> int:
    """Add a rule to a principal or a role. Create it if it is new."""
    rule = _rule(arguments)
    with changed(Path(arguments.file)) as document:
        rules = _rules(document, arguments)
        if rule not in rules:
            rules.append(rule)
    print(f"{_who(arguments)} may: {_allowed(rules)}")
    return 0


def deny(arguments: argparse.Namespace) -> int:
    """Remove a rule of a principal or a role. Without --models and --operations, remove all its rules."""
    with changed(Path(arguments.file)) as document:
        places = document.get("roles", {}) if arguments.role else document["principals"]
        if _subject(arguments) not in places:
            raise ConfigError(f"{_who(arguments)} is not in '{arguments.file}'")
        rules = _rules(document, arguments)
        if arguments.models is None and arguments.operations is None:
            rules.clear()
        elif (rule := _rule(arguments)) in rules:
            rules.remove(rule)
        else:
            raise ConfigError(f"{_who(arguments)} has no such rule; it may: {_allowed(rules)}")
    print(f"{_who(arguments)} may: {_allowed(rules)}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the principals and their keys, roles and issuers, without secrets."""
    document = load_document(Path(arguments.file))
    file = KeyFile.parse(document, Path(arguments.file))
    rows = [
        [
            name,
            key_id,
            key.get("created", ""),
            key.get("expires", ""),
            _allowed(principal.get("allow", [])) if principal.get("allow") or not principal.get("roles") else "",
            ",".join(principal.get("roles", [])),
            one_line(str(key.get("note", ""))),
        ]
        for name, principal in document["principals"].items()
        for key_id, key in (principal.get("keys") or {"-": {}}).items()
    ]
    print(draw_table(["Principal", "Key", "Created", "Expires", "Allowed", "Roles", "Note"], rows))
    if file.roles:
        print(draw_table(["Role", "Allowed"], [[name, _describe_rules(rules)] for name, rules in file.roles.items()]))
    if file.issuers:
        issuers = [
            [each.name, ",".join(each.audience), ",".join(each.algorithms), each.keys] for each in file.issuers.values()
        ]
        print(draw_table(["Issuer", "Audience", "Algorithms", "Keys"], issuers))
    return 0


def revoke(arguments: argparse.Namespace) -> int:
    """Remove a key, given by its id or in full, so that a leaked key can be pasted."""
    key_id = arguments.subject.removeprefix("hr_").partition("_")[0]
    with changed(Path(arguments.file)) as document:
        owners = [name for name, each in document["principals"].items() if key_id in each.get("keys", {})]
        if not owners:
            raise ConfigError(f"there is no key '{one_line(key_id)}' in '{arguments.file}'")
        del document["principals"][owners[0]]["keys"][key_id]
    print(f"key '{key_id}' of '{owners[0]}' is revoked")
    return 0


# ---------------------------------------------------------------------- check


def check(arguments: argparse.Namespace) -> int:
    """Check the file and its URLs. With --key, print the rights of that key or token."""
    file = KeyFile.read(Path(arguments.file))
    if arguments.key is None:
        for issuer in file.issuers.values():
            if issuer.has_address:
                _fetch(issuer.keys, issuer.algorithms)
        print(f"'{arguments.file}' is valid: {len(file)} keys")
        return 0
    credential = sys.stdin.readline().strip() if arguments.key == "-" else arguments.key
    what = "key" if not file.issuers or credential.startswith("hr_") else "token"
    found: Key | Verified | str
    if what == "key":
        found = file.find(credential)
    else:
        found = asyncio.run(_authenticate(file, credential))
        _explain(file, credential)
    if isinstance(found, str):
        print(f"headrace keys: the {what} is refused: {found}", file=sys.stderr)
        return 1
    print(f"the {what} belongs to '{found.principal.name}', who may: {_describe_rules(found.principal.rules)}")
    return _decisions(found.principal, arguments)


def _fetch(address: str, algorithms: tuple[str, ...]) -> None:
    try:
        KeySet.parse(read_address(address), algorithms)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the keys at '{address}' cannot be used: {one_line(str(error))}") from None


async def _authenticate(file: KeyFile, token: str) -> Verified | str:
    found = Tokens(file).find(token)
    return found if isinstance(found, Verified | str) else await found


def _explain(file: KeyFile, credential: str) -> None:
    """Print the claims of a token beside the values that the file expects."""
    token = decode_unverified(credential)
    if isinstance(token, str):
        return
    named = token.claims.get("iss")
    issuer = file.issuers.get(named) if isinstance(named, str) else None
    expected = {} if issuer is None else {"alg": ", ".join(issuer.algorithms), "aud": ", ".join(issuer.audience)}
    expected["iss"] = ", ".join(file.issuers)
    rows = [[name, _readable(name, token.header.get(name)), expected.get(name, "")] for name in ("alg", "kid")]
    shown = ["iss", "aud", *_TIMES, *([] if issuer is None else [issuer.principal, issuer.roles])]
    rows += [[name, _readable(name, token.claims.get(name)), expected.get(name, "")] for name in shown if name]
    print(draw_table(["In the token", "Value", "In the file"], rows))


def _readable(name: str, value: Any) -> str:
    if name in _TIMES and isinstance(value, int | float):
        try:
            return datetime.datetime.fromtimestamp(value, datetime.timezone.utc).isoformat(timespec="seconds")
        except (ValueError, OverflowError, OSError):
            pass
    return "" if value is None else one_line(value if isinstance(value, str) else json.dumps(value))[:200]


def _decisions(principal: Principal, arguments: argparse.Namespace) -> int:
    """Print yes or no for each of --operations on each of --models. Return 1 if one is no."""
    if arguments.models is None and arguments.operations is None:
        return 0
    refused = 0
    for model in (arguments.models or "").split(","):
        for name in (arguments.operations or "infer").split(","):
            category = next((each.category for each in Operation if each == name), "")
            may = principal.may(name, category, model)
            refused += not may
            print(f"{'yes' if may else 'no'}: {one_line(name)}{f' on {one_line(model)}' if model else ''}")
    return 1 if refused else 0


# ---------------------------------------------------------------------- parts of the file


def _subject(arguments: argparse.Namespace) -> str:
    if not arguments.subject:
        raise ValueError(f"name the principal: headrace keys {arguments.action} FILE PRINCIPAL")
    return str(arguments.subject)


def _who(arguments: argparse.Namespace) -> str:
    return f"{'the role ' if arguments.role else ''}'{arguments.subject}'"


def _rule(arguments: argparse.Namespace) -> dict[str, list[str]]:
    models = parse_patterns("*" if arguments.models is None else arguments.models, "--models")
    operations = parse_patterns(
        OPERATIONS_OF_NEW if arguments.operations is None else arguments.operations, "--operations"
    )
    return {"models": list(models), "operations": list(operations)}


def _rules(document: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, list[str]]]:
    """Return the rules of the principal or the role in ``document``. Changes of the list change the document."""
    name = _subject(arguments)
    found: list[dict[str, list[str]]]
    if arguments.role:
        found = document.setdefault("roles", {}).setdefault(name, [])
    else:
        found = document["principals"].setdefault(name, {}).setdefault("allow", [])
    return found


def _allowed(rules: list[dict[str, list[str]]]) -> str:
    return _describe_rules(AccessRule(tuple(each["models"]), tuple(each["operations"])) for each in rules)


def _describe_rules(rules: Any) -> str:
    return "; ".join(map(str, rules)) or "nothing"


#: The functions of the actions, by name.
ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "add": add,
    "allow": allow,
    "deny": deny,
    "list": show,
    "revoke": revoke,
    "check": check,
}
