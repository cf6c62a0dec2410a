"""BERT as an ONNX graph: Devlin et al., 2018, https://arxiv.org/abs/1810.04805, as MiniLM has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper, parser

LAYERS = 6
#: The further inputs of a layer, with the names of their weights in a checkpoint.
WEIGHTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "project": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "norm2": "output.LayerNorm",
}

#: Dropout does nothing at inference, and the only token type is added to ``positions``.
HEAD = """
<ir_version: 10, opset_import: ["": 20, "bert": 1]>
minilm (int64[rows, tokens] input_ids, int64[rows, tokens] attention_mask) => (float[rows, tokens, 384] hidden) {
    zero = Constant <value_ints = [0]> ()
    length = Shape <start = 1> (input_ids)
    place = Slice (positions, zero, length, zero)
    piece = Gather (words, input_ids)
    sum = Add (piece, place)
    x0 = LayerNormalization <epsilon = 1e-12> (sum, norm_w, norm_b)
    one = Constant <value_float = 1.0> ()
    far = Constant <value_float = -10000.0> ()
    heads = Constant <value_ints = [1, 2]> ()
    given = Cast <to = 1> (attention_mask)
    missing = Sub (one, given)
    pushed = Mul (missing, far)
    bias = Unsqueeze (pushed, heads)
"""

#: 12 heads of 32: scores are divided by the square root of 32.
LAYER = """
<domain: "bert", opset_import: ["": 20]>
Layer (x, bias, PARAMETERS) => (y) {
    split = Constant <value_ints = [0, 0, 12, 32]> ()
    joined = Constant <value_ints = [0, 0, 384]> ()
    scale = Constant <value_float = 5.656854249492381> ()
    q0 = MatMul (x, query_w)
    q1 = Add (q0, query_b)
    q2 = Reshape (q1, split)
    q = Transpose <perm = [0, 2, 1, 3]> (q2)
    k0 = MatMul (x, key_w)
    k1 = Add (k0, key_b)
    k2 = Reshape (k1, split)
    k = Transpose <perm = [0, 2, 3, 1]> (k2)
    v0 = MatMul (x, value_w)
    v1 = Add (v0, value_b)
    v2 = Reshape (v1, split)
    v = Transpose <perm = [0, 2, 1, 3]> (v2)
    s0 = MatMul (q, k)
    s1 = Div (s0, scale)
    s = Add (s1, bias)
    p = Softmax <axis = -1> (s)
    c0 = MatMul (p, v)
    c1 = Transpose <perm = [0, 2, 1, 3]> (c0)
    c = Reshape (c1, joined)
    a0 = MatMul (c, project_w)
    a1 = Add (a0, project_b)
    a2 = Add (a1, x)
    a = LayerNormalization <epsilon = 1e-12> (a2, norm1_w, norm1_b)
    f0 = MatMul (a, expand_w)
    f1 = Add (f0, expand_b)
    f = Gelu (f1)
    g0 = MatMul (f, contract_w)
    g1 = Add (g0, contract_b)
    g2 = Add (g1, a)
    y = LayerNormalization <epsilon = 1e-12> (g2, norm2_w, norm2_b)
}
"""

Array = npt.NDArray[Any]


def graph(weights: Mapping[str, Array]) -> onnx.ModelProto:
    """Return the net with the ``weights`` of a checkpoint: ``input_ids`` and ``attention_mask``, both
    i64[rows, tokens], give ``hidden`` f32[rows, tokens, 384]."""  # fmt: skip
    names = [f"{name}_{kind}" for name in WEIGHTS for kind in "wb"]
    model = parser.parse_model(HEAD + "\n".join(map(_call, range(LAYERS), [names] * LAYERS)) + "\n}\n")
    model.functions.append(parser.parse_function(LAYER.replace("PARAMETERS", ", ".join(names))))
    tensors = _embedding(weights)
    for layer in range(LAYERS):
        tensors |= _layer(weights, layer)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in tensors.items())
    onnx.checker.check_model(model)
    return model


def _call(layer: int, names: list[str]) -> str:
    result = "hidden" if layer == LAYERS - 1 else f"x{layer + 1}"
    return f"    {result} = bert.Layer (x{layer}, bias, {', '.join(f'{name}{layer}' for name in names)})"


def _embedding(weights: Mapping[str, Array]) -> dict[str, Array]:
    part = "embeddings."
    return {
        "words": weights[f"{part}word_embeddings.weight"],
        "positions": weights[f"{part}position_embeddings.weight"] + weights[f"{part}token_type_embeddings.weight"][0],
        "norm_w": weights[f"{part}LayerNorm.weight"],
        "norm_b": weights[f"{part}LayerNorm.bias"],
    }


def _layer(weights: Mapping[str, Array], layer: int) -> dict[str, Array]:
    """Matrices are transposed: a checkpoint has them as outputs x inputs."""
    tensors = {}
    for name, source in WEIGHTS.items():
        part = f"encoder.layer.{layer}.{source}"
        tensors[f"{name}_w{layer}"] = np.ascontiguousarray(weights[f"{part}.weight"].T)
        tensors[f"{name}_b{layer}"] = weights[f"{part}.bias"]
    return tensors
