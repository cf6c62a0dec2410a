"""Which fields a config has set, by their paths."""

from __future__ import annotations

import pytest

from headrace.config.completed_fields import is_set, names_all_tensors
from headrace.config.parse import parse_text

CONFIG = parse_text(
    'name: "m" input [{ name: "x" dims: [ 4, 0 ] }, { name: "y" }] dynamic_batching {} '
    'parameters { key: "a.b[\'c\']" value { string_value: "v" } } optimization { graph { level: 1 } }'
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", True),
        ("name", True),
        ("backend", False),
        ("input", True),
        ("output", False),
        ("input[0].dims", True),
        ("input[0].dims[1]", True),
        ("input[0].dims[2]", False),
        ("input[1].dims", False),
        ("input[2].name", False),
        ("dynamic_batching", True),
        ("dynamic_batching.preferred_batch_size", False),
        ("""parameters["a.b['c']"]""", True),
        ("""parameters["a.b['c']"].string_value""", True),
        ("parameters['a']", False),
        ("optimization.graph.level", True),
        ("optimization.cuda.graphs", False),
        ("no_such_field", False),
    ],
)
def test_a_path_is_set_if_the_config_has_a_value_there(path: str, expected: bool) -> None:
    assert is_set(CONFIG, path) is expected


def test_inputs_and_outputs_are_both_needed() -> None:
    assert not names_all_tensors(CONFIG)
    assert names_all_tensors(parse_text('input { name: "x" } output { name: "y" }'))
    assert not names_all_tensors(parse_text('output { name: "y" }'))
