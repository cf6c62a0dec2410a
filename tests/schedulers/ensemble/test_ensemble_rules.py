"""Rules of ``ensemble_scheduling``: valid configs pass, and each invalid one is refused with the exact text.

Texts are Triton's (docs/spec/behaviours.md section 4.8) where it has one; where it has none, the text names the thing,
the value and the rule.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace import Code, HeadraceError, ModelConfig, Problem, Server
from headrace.config.derive import derive
from headrace.config.validation import problems
from headrace_ensemble import EnsembleScheduler

ENSEMBLE = 'name: "e" platform: "ensemble" '
IO = 'input { name: "x" data_type: TYPE_FP32 dims: [4] } output { name: "y" data_type: TYPE_FP32 dims: [4] } '


def step(inputs: str, outputs: str, model: str = "a") -> str:
    """Return a step that reads and writes the named tensors, each as an input or output of that name in capitals."""
    reads = " ".join(f'input_map {{ key: "{name.upper()}" value: "{name}" }}' for name in inputs.split())
    writes = " ".join(f'output_map {{ key: "{name.upper()}" value: "{name}" }}' for name in outputs.split())
    return f'step {{ model_name: "{model}" model_version: -1 {reads} {writes} }} '


def ensemble(*steps: str) -> str:
    return f"{ENSEMBLE}{IO}ensemble_scheduling {{ {''.join(steps)} }}"


GOOD = {
    "ensemble": f"""platform: "ensemble" max_batch_size: 8 {IO}
        ensemble_scheduling {{
          step {{ model_name: "late" model_version: 2 input_map {{ key: "A" value: "mid" }}
            input_map {{ key: "B" value: "x" }} output_map {{ key: "C" value: "y" }} }}
          step {{ model_name: "early" model_version: -1 input_map {{ key: "A" value: "x" }}
            output_map {{ key: "B" value: "mid" }} }}
        }}""",
    "ensemble_output_that_is_read_too": f"""platform: "ensemble" {IO}
        output {{ name: "z" data_type: TYPE_FP32 dims: 4 }}
        ensemble_scheduling {{
          step {{ model_name: "a" model_version: -1 input_map {{ key: "A" value: "x" }}
            output_map {{ key: "B" value: "y" }} }}
          step {{ model_name: "b" model_version: -1 input_map {{ key: "A" value: "y" }}
            output_map {{ key: "B" value: "z" }} }}
        }}""",
    "ensemble_that_writes_its_input": f"""platform: "ensemble" {IO}
        ensemble_scheduling {{
          step {{ model_name: "a" model_version: -1 input_map {{ key: "A" value: "x" }}
            output_map {{ key: "B" value: "y" }} }}
          step {{ model_name: "b" model_version: -1 input_map {{ key: "A" value: "y" }}
            output_map {{ key: "B" value: "x" }} }}
        }}""",
}

ENSEMBLES = [
    (
        "other_platform",
        f'name: "m" platform: "onnxruntime_onnx" {IO} ensemble_scheduling {{ {step("x", "y")} }}',
        "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
    ),
    (
        "instances",
        f"{ensemble(step('x', 'y'))} instance_group {{ }}",
        "instance group should not be specified for ensemble 'e'",
    ),
    (
        "optimization",
        f"{ensemble(step('x', 'y'))} optimization {{ }}",
        "optimization should not be specified for ensemble 'e'",
    ),
    (
        "warmup",
        f"{ensemble(step('x', 'y'))} model_warmup {{ }}",
        "model_warmup can not be specified for ensemble 'e'",
    ),
    ("no_step", ensemble(), "must specify 'step' for ensemble 'e'"),
    (
        "model_name",
        ensemble(step("x", "y"), step("y", "z", model="")),
        "must specify 'model_name' in step 1 of ensemble 'e'",
    ),
    ("input_map", ensemble(step("", "y")), "must specify 'input_map' in step 0 of ensemble 'e'"),
    ("output_map", ensemble(step("x", "")), "must specify 'output_map' in step 0 of ensemble 'e'"),
    (
        "empty_tensor",
        ensemble('step { model_name: "a" input_map { key: "X" value: "" } output_map { key: "Y" value: "y" } }'),
        "'input_map' in step 0 of ensemble 'e' maps 'X' to '', expected the name of a tensor on both sides",
    ),
    (
        "version",
        ensemble(step("x", "y").replace("model_version: -1", "model_version: -2")),
        "step 0 of ensemble 'e' has model_version -2, expected -1 for the latest or an integer >= 0",
    ),
    ("itself", ensemble(step("x", "y", model="e")), "circular dependency between ensembles: e -> ... -> e -> e"),
    (
        "written_twice",
        ensemble(step("x", "y"), step("x", "y")),
        "ensemble tensor 'y' can appear in an output map only once for ensemble 'e' step 1",
    ),
    (
        "unused_input",
        f'{ensemble(step("x", "y"))} input {{ name: "w" data_type: TYPE_FP32 dims: 4 }}',
        "ensemble input 'w' for ensemble e' is not used",
    ),
    (
        "unused_output",
        f'{ensemble(step("x", "y"))} output {{ name: "w" data_type: TYPE_FP32 dims: 4 }}',
        "ensemble output 'w' for ensemble e' is not used",
    ),
    (
        "output_not_reached",
        ensemble(step("x v", "y")),
        "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, 'v', is not connected",
    ),
    (
        "output_far_from_reached",
        ensemble(step("w", "y"), step("x v", "w")),
        "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, 'v', is not connected",
    ),
    (
        "circle",
        ensemble(step("x w", "y"), step("y", "w")),
        "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, 'w', is not connected",
    ),
    ("output_of_itself", ensemble(step("x y", "y")), "output 'y' for ensemble 'e' is not written"),
    ("unused_tensor", ensemble(step("x", "y z")), "ensemble tensor 'z' is unused in ensemble 'e'"),
    (
        "step_that_never_runs",
        ensemble(step("x", "y"), step("v", "w")),
        "ensemble tensor 'w' is unused in ensemble 'e'",
    ),
]

#: Further errors that follow from the mistake in a config.
CONSEQUENCES = {
    "ensemble tensor 'v' is unused in ensemble 'e'",
    "ensemble tensor 'w' is unused in ensemble 'e'",
}


def found(text: str) -> list[Problem]:
    """Return the problems of the config, as a load finds them."""
    config = ModelConfig()
    text_format.Parse(text, config)
    config.name = config.name or "m"
    derive(config, config.name, ("1",))
    before = config.SerializeToString(deterministic=True)
    scheduled = EnsembleScheduler.check_config(config, completed=True)
    problems_found = problems(config, needs_backend=EnsembleScheduler.needs_instances, scheduled=scheduled)
    assert config.SerializeToString(deterministic=True) == before
    return problems_found


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_a_good_config_passes(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "message"), [pytest.param(text, message, id=name) for name, text, message in ENSEMBLES]
)
def test_a_bad_config_is_refused_with_the_broken_rule(text: str, message: str) -> None:
    problems_found = found(text)
    assert (problems_found[0].message, problems_found[0].code) == (message, Code.INVALID_ARGUMENT)
    assert {problem.message for problem in problems_found} - CONSEQUENCES - {message} == set()


def test_an_enormous_graph_is_refused_in_the_time_it_takes_to_read_it() -> None:
    """Every walk of the graph is bounded before it starts."""
    chain = ModelConfig(name="m", platform="ensemble")
    for index in range(5_000):
        added = chain.ensemble_scheduling.step.add(model_name="a", model_version=-1)
        added.input_map["X"] = f"t{index + 1}"
        added.output_map["Y"] = f"t{index}"
    chain.output.add(name="t0", data_type=1, dims=[1])
    started = time.process_time()
    first = next(iter(EnsembleScheduler.check_config(chain, completed=True)))
    assert first.message == (
        "output 't0' for ensemble 'm' is not written: at least one of its depending tensors, 't5000', is not connected"
    )
    assert time.process_time() - started < 10  # milliseconds, unless something is quadratic


#: Mistakes, and Triton 2.51's words for them; it needs no version of the model to find most.
MISTAKES = {
    "step": (
        'platform: "ensemble" max_batch_size: 1 ensemble_scheduling { step { model_name: "n" model_version: -1 } }',
        "must specify 'input_map' in step 0 of ensemble 'm'",
    ),
    "no ensemble": (
        'backend: "identity" ensemble_scheduling { step { model_name: "n" } }',
        "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("versions", [(), (1,)])
def test_a_config_error_is_reported_before_missing_parts(
    mistake: str, versions: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, message = MISTAKES[mistake]
    (tmp_path / "m").mkdir()
    for version in versions:
        (tmp_path / "m" / str(version)).mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    with pytest.raises(HeadraceError, match="failed to load all models"), Server(tmp_path):
        pass
    assert message in caplog.text
    assert "at least one version" not in caplog.text
    assert "pip install" not in caplog.text
