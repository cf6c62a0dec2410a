"""What access keys take of a request: ``python benchmarks/access.py``.

CPU per request to an identity model on the event loop, over HTTP and gRPC, without sockets, as `tracing` measures it.
The key file has 10,000 principals with a key each. Each setting has a process of its own; they run in turns, and the
least of all rounds of a thousand requests counts. With ``--bytecodes``, what Python executes for a request instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tracing import _CONFIG, measure

from headrace import Server, ServerOptions
from headrace.config.option_parts import Restriction
from headrace_access import AccessOptions
from headrace_access.key_file import new_key

KEYS = 10_000
SETTINGS = ("off", "off, with the header", "another interceptor", "keys")


def write_keys(path: Path, count: int = KEYS) -> str:
    """Write a key file with ``count`` principals. Return the key of one."""
    principals, key = {}, ""
    for number in range(count):
        key, key_id, digest = new_key()
        allow = [{"models": ["numbers", f"own{number}*"], "operations": ["inference", "metadata"]}]
        principals[f"user{number}"] = {"keys": {key_id: {"sha256": digest}}, "allow": allow}
    path.write_text(json.dumps({"principals": principals}))
    return key


def run(setting: str, rounds: int, counts: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models/numbers/1").mkdir(parents=True)
        (Path(folder) / "models/numbers/config.pbtxt").write_text(_CONFIG)
        key = write_keys(Path(folder) / "access.json")
        restricted = {"model-repository": Restriction("key", "value")} if setting == "another interceptor" else {}
        groups: list[Any] = [AccessOptions(keys=f"{folder}/access.json")] if setting == "keys" else []
        options = ServerOptions(
            model_repository=(f"{folder}/models",),
            plugin_options=groups,
            http_restricted_api=restricted,
            grpc_restricted_protocol=restricted,
        )
        authorization = "" if setting == "off" else f"Bearer {key}"
        with Server(options) as server:
            return server._call(measure, server, rounds, counts, authorization)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--bytecodes", action="store_true")
    parser.add_argument("--setting", choices=SETTINGS, help="this one only, as JSON")
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(run(options.setting, options.rounds, options.bytecodes)))
        return
    rounds = 1 if options.bytecodes else options.rounds
    least: dict[str, dict[str, float]] = {name: {} for name in SETTINGS}
    for _ in range(1 if options.bytecodes else options.turns):
        for setting, found in least.items():
            words = [sys.executable, __file__, f"--setting={setting}", f"--rounds={rounds}"]
            words += ["--bytecodes"] * options.bytecodes
            output = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
            for title, us in json.loads(output).items():
                found[title] = min(found.get(title, us), us)
    unit = "bytecodes" if options.bytecodes else "µs"
    for setting, found in least.items():
        shares = "  ".join(f"{title} {us:7.2f} {unit} {us / least['off'][title]:6.3f}" for title, us in found.items())
        print(f"{shares}  {setting}")


if __name__ == "__main__":
    main()
