"""Measure the cost of a router, and the accuracy of its split: ``python benchmarks/router.py``.

One process serves two identities and routers in front of them. Callers alternate between the models. Prints CPU per
request, with instances on threads and on the event loop: the minimum of the rounds, and the difference to the model
without a router. Then 100,000 requests measure the split. Needs ``headrace-router``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ensembles import cpu_us

from headrace import Server

CALLERS = (1, 16, 64)
_SHAPES = """max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
USERS = 1000
#: Routers by their further parameters of the scheduler.
ROUTERS = {
    "weights": {},
    "sticky": {"sticky": "parameter:user"},
    "rules": {"rules": "parameter:user = 7 -> second"},
}
_SPLIT = (90, 7.5, 2.5)


def write(folder: Path, event_loop: str) -> None:
    identity = f"""{_SHAPES} backend: "identity" dynamic_batching {{ }} instance_group {{ count: 1 kind: KIND_CPU }}
    parameters {{ key: "event_loop" value {{ string_value: "{event_loop}" }} }}"""
    configs = dict.fromkeys(("model", "second", "third"), identity)
    configs |= {name: _router({"targets": "model = 90, second = 10", **more}) for name, more in ROUTERS.items()}
    shares = zip(("model", "second", "third"), _SPLIT, strict=True)
    configs["split"] = _router({"targets": ", ".join(f"{name} = {weight}" for name, weight in shares)})
    for name, config in configs.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)


def _router(options: dict[str, str]) -> str:
    parameters = {"scheduler": "router", **{f"scheduler.{key}": value for key, value in options.items()}}
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--split", type=int, default=100_000, help="requests that count the split")
    options = parser.parse_args()
    models = ("model", *ROUTERS)
    for where, event_loop in (("threads", "off"), ("event loop", "on")):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), event_loop)
            with Server(folder) as server:
                for callers in CALLERS:
                    least = dict.fromkeys(models, float("inf"))
                    for _ in range(options.rounds):
                        for model in models:
                            took = server._call(cpu_us, server, model, options.requests, callers, USERS)
                            least[model] = min(least[model], took)
                    alone = least["model"]
                    more = ", ".join(f"{name} {least[name] - alone:+5.1f}" for name in ROUTERS)
                    print(f"{where:10} {callers:3} callers: the model {alone:6.1f} µs; routers {more} µs")
                server._call(cpu_us, server, "split", options.split, 64, USERS)
                count = {name: server.served(name)[0].snapshot().success.count for name in ("third",)}
                print(f"{where:10} {options.split:,} requests, of which 2.5 % are for the third: {count['third']:,}")


if __name__ == "__main__":
    main()
