"""Incompatible models are refused at load, with Triton's text and further details."""

from __future__ import annotations

import pytest

from headrace import ConfigError, SchedulerContext
from headrace_ensemble import EnsembleScheduler
from headrace_testing.simulator import run_scenario

from .conftest import both, ensemble, identity, step
from .simulator import EnsembleSimulator, other, parsed, specs

DECOUPLED = "model_transaction_policy { decoupled: true }"
ADD = f"max_batch_size: 8 {both('p q', 's')}"
MANY = f"max_batch_size: 8 {both('a', 'b c')} {DECOUPLED}"
MODELS = {
    "one": identity(),
    "int": identity(datatype="INT32"),
    "wide": identity(dims="3"),
    "any": identity(dims="-1"),
    "rank": identity(dims="2, 2"),
    "alone": identity(batch=0, dims="-1, 2"),
    "single": identity(batch=0),
    "add": ADD,
    "many": MANY,
    "mute": f"max_batch_size: 8 {both('a? c?', 'b')}",
}
E = "in ensemble e, "


def refusal(config: str) -> ConfigError:
    found: list[ConfigError] = []

    async def scenario() -> None:
        with pytest.raises(ConfigError) as caught:
            EnsembleSimulator(config, MODELS)
        found.append(caught.value)

    run_scenario(scenario)
    return found[0]


@pytest.mark.parametrize(
    ("config", "message", "field"),
    [
        (
            ensemble([step("one", "a=x", "b=y")], batch=16),
            "ensemble e allows maximum batch size 16, but it contains model one which only allows maximum batch size "
            "to be 8",
            "step[0].model_name",
        ),
        (
            ensemble([step("one", "a=x", "b=y")], datatype="INT32"),
            f"{E}ensemble tensor x: inconsistent data type: TYPE_INT32 is inferred from model e while TYPE_FP32 is "
            "inferred "
            "from model one (the ensemble's input, input a of step 0)",
            "step[0].input_map['a']",
        ),
        (
            ensemble([step("one", "a=x", "b=m"), step("int", "a=m", "b=y")]),
            f"{E}ensemble tensor m: inconsistent data type: TYPE_FP32 is inferred from model one while TYPE_INT32 is "
            "inferred from model int (output b of step 0, input a of step 1)",
            "step[1].input_map['a']",
        ),
        (
            ensemble([step("one", "a=x", "b=m"), step("wide", "a=m", "b=y")]),
            f"{E}ensemble tensor m: inconsistent shape: [-1,2] is inferred from model one while [-1,3] is inferred "
            "from model wide "
            "(output b of step 0, input a of step 1)",
            "step[1].input_map['a']",
        ),
        (
            ensemble([step("one", "a=x", "b=m"), step("rank", "a=m", "b=y")]),
            f"{E}ensemble tensor m: inconsistent shape: [-1,2] is inferred from model one while [-1,2,2] is inferred "
            "from model "
            "rank",
            "step[1].input_map['a']",
        ),
        (
            ensemble([step("add", "p=x", "s=y")]),
            f"{E}input q in model add is not mapped to any ensemble tensors (step 0)",
            "step[0].input_map",
        ),
        (
            ensemble([step("one", "a=x zz=x", "b=y")]),
            f"{E}ensemble tensor x is mapping to non-existing input zz in model one (step 0), which has a",
            "step[0].input_map['zz']",
        ),
        (
            ensemble([step("one", "a=x", "b=m zz=y"), step("one", "a=m", "b=z")], outputs="y z"),
            f"{E}ensemble tensor y is mapped from non-existing output zz in model one (step 0), which has b",
            "step[0].output_map['zz']",
        ),
        (
            ensemble(
                [step("many", "a=x", "b=m c=n"), step("add", "p=m q=x", "s=y"), step("one", "a=n", "b=z")],
                outputs="y z",
            ),
            f"{E}step of model 'add' receives inputs originated from different decoupled models (step 1 reads m of "
            "'many', x "
            "of the request)",
            "step[1].input_map",
        ),
        (
            ensemble(
                [step("many", "a=x", "b=m c=n"), step("many", "a=x", "b=o c=p"), step("add", "p=m q=o", "s=y"),
                 step("add", "p=n q=p", "s=z")],
                outputs="y z",
            ),
            f"{E}step of model 'add' receives inputs originated from different decoupled models (step 2 reads m of "
            "'many', o "
            "of 'many')",
            "step[2].input_map",
        ),
        (
            ensemble(
                [step("many", "a=x", "b=y c=n"), step("one", "a=x", "b=z"), step("one", "a=n", "b=w")], outputs="y z w"
            ),
            f"{E}step of model 'e' receives inputs originated from different decoupled models (its outputs are y of "
            "'many', z "
            "of the request, w of 'many')",
            "output",
        ),
    ],
)  # fmt: skip
def test_incompatible_models_are_refused_with_step_tensor_and_both_sides(config: str, message: str, field: str) -> None:
    error = refusal(config)
    assert error.message.startswith(message)
    assert error.field.removeprefix("ensemble_scheduling.") == field


@pytest.mark.parametrize(
    ("config", "is_decoupled"),
    [
        (ensemble([step("one", "a=x", "b=m"), step("any", "a=m", "b=y")]), False),
        (ensemble([step("any", "a=x", "b=m"), step("wide", "a=m", "b=y")], dims="-1"), False),
        (ensemble([step("alone", "a=x", "b=m"), step("one", "a=m", "b=y")]), False),
        (ensemble([step("single", "a=x", "b=m"), step("one", "a=m", "b=y")]), False),
        (ensemble([step("single", "a=x", "b=y")], batch=16), False),
        (ensemble([step("mute", "a=x", "b=y")]), False),
        (ensemble([step("many", "a=x", "b=m c=n"), step("add", "p=m q=n", "s=y")]), True),
        (ensemble([step("one", "a=x", "b=y")], more=DECOUPLED), False),
    ],
)
def test_compatible_models_are_served_and_decoupled_only_if_a_step_is(config: str, is_decoupled: bool) -> None:
    async def scenario() -> None:
        simulator = EnsembleSimulator(config, MODELS)
        assert simulator.config.model_transaction_policy.decoupled is is_decoupled

    run_scenario(scenario)


def test_the_labels_are_those_of_the_model_that_gives_the_output() -> None:

    config = parsed(ensemble([step("one", "a=x", "b=y"), step("one", "a=x", "b=z")], outputs="y z"), "e")
    (needed,) = EnsembleScheduler.depends_on(config)
    inputs, outputs = specs(config)
    unused: object = None
    context = SchedulerContext(
        config, unused, inputs, outputs, (), unused, unused, unused, unused, unused, unused,  # type: ignore[arg-type]
        others={needed: other(identity(), "one", labels={"b": ["cat", "dog"]})},
    )  # fmt: skip
    assert EnsembleScheduler(context).labels == {"y": ["cat", "dog"], "z": ["cat", "dog"]}
