from __future__ import annotations

import pytest

from headrace.config.option_parts import RateLimitResource
from headrace.executors.devices import Resource, ResourceDemand
from headrace.schedulers.resource_limits import limits_for, shown

R, GLOBAL = Resource("R", 0), Resource("G")


@pytest.mark.parametrize(
    ("limits", "resource", "available"),
    [
        ((), R, 2),
        ((RateLimitResource("R", 5),), R, 5),
        ((RateLimitResource("R", 5), RateLimitResource("R", 3, 0)), R, 5),
        ((RateLimitResource("R", 3), RateLimitResource("R", 5, 0)), R, 5),
        ((RateLimitResource("R", 3), RateLimitResource("R", 5)), R, 3),
        ((RateLimitResource("R", 5), RateLimitResource("R", 9, 1)), R, 5),
        ((RateLimitResource("G", 3), RateLimitResource("G", 7, 1), RateLimitResource("R", 2)), GLOBAL, 7),
    ],
)
def test_the_limit_is_the_operators_or_the_largest_demand(
    limits: tuple[RateLimitResource, ...], resource: Resource, available: int
) -> None:
    assert limits_for([ResourceDemand({resource: 2}), ResourceDemand({resource: 1})], limits)[resource] == available


def test_resource_limits_are_logged_as_by_triton() -> None:
    """Recorded from Triton 2.51, without the last instance and with it."""
    assert shown({}) == "\nMax Resource Map===>\n"
    limits = limits_for([ResourceDemand({Resource("R1", 0): 4, Resource("G"): 3})], ())
    assert shown(limits) == (
        "\nMax Resource Map===>\n\tDevice: GLOBAL\n\t\tResource: G\t Count: 3\n"
        "\tDevice: 0\n\t\tResource: R1\t Count: 4\n"
    )
