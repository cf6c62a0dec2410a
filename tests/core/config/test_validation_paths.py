"""No field of a config names a file outside its model's directory (docs/spec/security.md C2 and C3)."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.validation import Problem, problems
from headrace.errors import Code

BASE = """
name: "m" backend: "identity" max_batch_size: 8 version_policy { latest { num_versions: 1 } }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
STATE = 'input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: 1'

#: Each field that names a file: what sets it, its path, and the words for where it must stay.
FIELDS = {
    "default_model_filename": ("default_model_filename: %s", "default_model_filename", "the model directory"),
    "cc_model_filenames": (
        'cc_model_filenames { key: "7.5" value: %s }',
        "cc_model_filenames['7.5']",
        "the model directory",
    ),
    "op_library_filename": (
        "model_operations { op_library_filename: %s }",
        "model_operations.op_library_filename[0]",
        "the model directory",
    ),
    "warmup": (
        'model_warmup { batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 input_data_file: %s } } }',
        "model_warmup[0].inputs['x'].input_data_file",
        "the model's 'warmup' directory",
    ),
    "initial_state": (
        f"sequence_batching {{ state {{ {STATE} initial_state "
        '{ name: "i" data_type: TYPE_FP32 dims: 1 data_file: %s } } }',
        "sequence_batching.state[0].initial_state[0].data_file",
        "the model's 'initial_state' directory",
    ),
}

#: A name outside its directory (as text of a config), its printed form, and the expected reason.
NAMES = {
    "absolute": ('"/etc/passwd"', "/etc/passwd", "it is absolute"),
    "climbing": ('"../../secret"', "../../secret", "it climbs out with '..'"),
    "climbing_later": ('"a/./../../../b"', "a/./../../../b", "it climbs out with '..'"),
    "climbing_over_empty_parts": ('"a//../../../b"', "a//../../../b", "it climbs out with '..'"),
    "backslash": (r'"..\\secret"', r"..\secret", "it contains a backslash"),
    "drive": (r'"C:\\secret"', r"C:\secret", "it contains a backslash"),
    "unc": (r'"\\\\host\\secret"', r"\\host\secret", "it contains a backslash"),
    "nul": (r'"a\000b"', r"a\x00b", "it contains NUL"),
}


def config(text: str) -> ModelConfig:
    parsed = ModelConfig()
    text_format.Parse(BASE + text, parsed)
    return parsed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", FIELDS)
def test_a_name_that_leaves_its_directory_is_refused(field: str, name: str, tmp_path: Path) -> None:
    text, path, room = FIELDS[field]
    literal, printed, reason = NAMES[name]
    expected = [Problem(path, f"{path} '{printed}' of model 'm' must stay in {room}: {reason}")]
    assert problems(config(text % literal)) == expected
    assert problems(config(text % literal), files=tmp_path) == expected


@pytest.mark.parametrize("name", [name for name in NAMES if name != "backslash"])
def test_a_label_file_that_leaves_the_directory_is_refused_in_tritons_words(name: str) -> None:
    literal, printed, _ = NAMES[name]
    bad = config(f'output {{ name: "z" data_type: TYPE_FP32 dims: 1 label_filename: {literal} }}')
    message = f"label file path '{printed}' for output 'z' in model 'm' is outside model directory"
    assert problems(bad) == [Problem("output[1].label_filename", message, Code.UNSUPPORTED)]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", ["a", "a.b", "sub/a", "./a", "sub/../a", "..a", "a..", ".../a"])
def test_a_name_that_stays_is_taken(field: str, name: str, tmp_path: Path) -> None:
    assert problems(config(FIELDS[field][0] % f'"{name}"'), files=tmp_path) == []


@pytest.mark.parametrize(
    ("field", "is_taken"),
    [
        ("default_model_filename", True),
        ("cc_model_filenames", True),
        ("op_library_filename", True),
        ("warmup", False),
        ("initial_state", False),
    ],
)
def test_only_a_file_of_a_version_may_lie_beside_the_version(field: str, is_taken: bool) -> None:
    assert (problems(config(FIELDS[field][0] % '"../shared.bin"')) == []) is is_taken


def test_a_link_that_stays_in_the_directory_is_followed(tmp_path: Path) -> None:
    """Kubernetes volumes have such links."""
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "labels.txt").write_text("a\n")
    (tmp_path / "labels.txt").symlink_to(tmp_path / "..data" / "labels.txt")
    good = config('output { name: "z" data_type: TYPE_FP32 dims: 1 label_filename: "labels.txt" }')
    assert problems(good, files=tmp_path) == []


def test_a_loop_of_links_and_a_name_too_long_do_not_crash(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "a").symlink_to(tmp_path / "warmup" / "a")
    for name in ("a", "a" * 5000):
        problems(config(FIELDS["warmup"][0] % f'"{name}"'), files=tmp_path)
        problems(strategy(name), files=tmp_path)


def strategy(library: str) -> ModelConfig:
    return config(
        f'parameters {{ key: "TRITON_BATCH_STRATEGY_PATH" value {{ string_value: "{library}" }} }}',
    )


@pytest.mark.parametrize("library", ["../s.so", "/etc/s.so", "link.so"])
def test_a_batching_library_outside_is_refused(library: str, tmp_path: Path) -> None:
    (tmp_path / "link.so").symlink_to("/etc/passwd")
    assert [problem.message for problem in problems(strategy(library), files=tmp_path)] == [
        "Batching library path escapes model repository."
    ]


def test_a_batching_library_must_exist_and_may_be_absolute(tmp_path: Path) -> None:
    library = tmp_path / "s.so"
    assert [problem.message for problem in problems(strategy(str(library)), files=tmp_path)] == [
        f"Batching library path not found: {library}"
    ]
    library.touch()
    assert problems(strategy(str(library)), files=tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_runtime_that_leaves_the_backend_s_directory_is_refused(name: str) -> None:
    literal, printed, _ = NAMES[name]
    message = (
        f"backend library name '{printed}' escapes backend directory, for model 'm', check model config runtime field"
    )
    assert problems(config(f"runtime: {literal}")) == [Problem("runtime", message)]


def test_a_runtime_is_a_python_file_or_the_name_that_old_configs_have() -> None:
    for name in ("", "model.py", "other.py", "libtriton_identity.so"):
        assert problems(config(f'runtime: "{name}"')) == []
    (problem,) = problems(config('runtime: "libnothere.so"'))
    assert problem.message.startswith("unable to find backend library 'libnothere.so' for model 'm'")  # as Triton
