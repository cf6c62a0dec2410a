"""The scheduler of ensembles under the conformance kit of schedulers."""

from __future__ import annotations

from typing import ClassVar

from headrace_testing import SchedulerConformance

from .conftest import step

CHAIN = step("one", "x=x", "y=m") + step("two", "x=m", "y=y")


class TestEnsemble(SchedulerConformance):
    plugin, scheduler = "headrace_ensemble", "ensemble_scheduling"
    config = f'platform: "ensemble" ensemble_scheduling {{ {CHAIN} }}'
    others = ("one", "two")
    mistakes: ClassVar = {
        "ensemble_scheduling { step { } }": "ensemble_scheduling.step[2].model_name",
        "instance_group { }": "instance_group",
    }
