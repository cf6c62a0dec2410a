"""Resources of the rate limiter, in the reports of ``headrace check``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.inspect.checking import checked, write


def test_unavailable_resources_are_a_problem_if_resources_are_limited(
    repository: Path, headrace: Callable[..., Any]
) -> None:
    asks = 'rate_limiter { resources { name: "R" count: 3 } }'
    tensors = "data_type: TYPE_FP32 dims: 1"
    io = f'input {{ name: "x" {tensors} }} output {{ name: "y" {tensors} }}'
    write(repository, "greedy", f'backend: "identity" {io} instance_group {{ kind: KIND_CPU {asks} }}')
    limited = ["--rate-limit=execution_count", "--rate-limit-resource=R:2"]
    assert checked(headrace, str(repository))[1]["greedy"]["problems"] == []
    assert checked(headrace, "--rate-limit=execution_count", str(repository))[1]["greedy"]["problems"] == []
    (problem,) = checked(headrace, *limited, str(repository))[1]["greedy"]["problems"]
    assert problem["message"].startswith('Resource count for "R" is limited to 2')
    code, stderr = headrace("check", "--rate-limit-resource=R:x", str(repository)).finish()
    assert (code, stderr) == (
        1,
        'Bad option: "--rate-limit-resource".\nInvalid option value. Got x\n',
    )


@pytest.mark.parametrize("words", [[], ["--no-load"]])
def test_a_resource_both_global_and_per_device_is_a_problem_of_both_models(
    repository: Path, headrace: Callable[..., Any], words: list[str]
) -> None:
    tensors = "data_type: TYPE_FP32 dims: 1"
    io = f'input {{ name: "x" {tensors} }}\noutput {{ name: "y" {tensors} }}'
    group = 'instance_group {{ kind: KIND_CPU\nrate_limiter {{ resources {{ name: "R" {} }} }} }}'
    says = {"a": "count: 1", "b": "count: 1 global: true", "c": "count: 1"}
    for name, text in says.items():
        write(repository, name, f'backend: "identity" {io}\n{group.format(text)}')
    limited = [*words, "--rate-limit=execution_count"]
    assert not any(each["problems"] for each in checked(headrace, *words, str(repository))[1].values())
    code, found, _ = checked(headrace, *limited, str(repository))
    problems = {name: [(each["line"], each["message"]) for each in found[name]["problems"]] for name in found}
    twice = 'Resource "R" is present as both global and device-specific resource in the model configuration. '
    of_a_device = [(4, twice + "Here it is per device, and model 'b' has it global")]
    assert (code, problems) == (
        1,
        {
            "a": of_a_device,
            "b": [(4, twice + "Here it is global, and model 'a' has it per device")],
            "c": of_a_device,
            "echo": [],
        },
    )
    assert checked(headrace, *limited, str(repository / "a"))[0] == 0
