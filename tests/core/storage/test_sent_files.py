from __future__ import annotations

import posixpath
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, InvalidArgument
from headrace.storage.sent_files import parse_overrides, write_files


def test_a_config_is_json_and_files_are_bytes() -> None:
    overrides = parse_overrides({"config": '{"maxBatchSize": 3}', "file:1/model.py": b"x", "file:./2//a/../b": b""})
    assert overrides.config is not None
    assert overrides.config.max_batch_size == 3
    assert overrides.files == {"1/model.py": b"x", "2/b": b""}
    assert parse_overrides({}).config is None


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"file:1/a": b""}, "Load parameter 'config' must be specified for model file override"),
        ({"what": "x"}, "Unrecognized load parameter 'what' with type 'STRING'"),
        ({"config": b"{}"}, "Unrecognized load parameter 'config' with type 'BYTES'"),
        ({"file:1/a": "x"}, "Unrecognized load parameter 'file:1/a' with type 'STRING'"),
        ({"config": "{"}, "Invalid config override: not JSON: "),
        ({"config": ""}, "Invalid config override: not JSON: "),
        ({"config": "[]"}, "Invalid config override: expected a JSON object"),
        ({"config": '{"nofield": 1}'}, "Invalid config override: "),
    ],
)
def test_invalid_override_is_refused(parameters: dict[str, str | bytes], text: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        parse_overrides(parameters)
    assert caught.value.message.startswith(text)


@pytest.mark.parametrize(
    ("name", "normalized"),
    [("../x", "../x"), ("1/../../y", "../y"), ("/../x", "../x"), ("//", "."), ("", "."), ("a/..", "."),
     ("..", ".."), ("1/a\0b", "1/a\\0b")],
)  # fmt: skip
def test_a_path_that_leaves_the_model_is_refused_in_tritons_words(name: str, normalized: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_overrides({"config": "{}", f"file:{name}": b"x"})
    assert caught.value.message == (
        f"Invalid file parameter 'file:{name}' with normalized path '{normalized}' must stay within model directory."
    )


@pytest.mark.parametrize("name", ["1/model.py", "/1/model.py", "//1//model.py", "/a/../1/model.py"])
def test_a_path_with_a_slash_in_front_is_below_the_models_directory(name: str) -> None:
    assert parse_overrides({"config": "{}", f"file:{name}": b"x"}).files == {"1/model.py": b"x"}


NAMES = st.lists(st.sampled_from(["..", ".", "", "a", "b", "\0", "\\", "%2e%2e", "C:", "\u2215", " "]), max_size=6)


@given(st.lists(NAMES.map("/".join), min_size=1, max_size=3))
def test_no_name_writes_outside_the_model(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    root = tmp_path_factory.mktemp("root")
    model = root / "model"
    model.mkdir()
    try:
        overrides = parse_overrides({"config": "{}", **{f"file:{name}": b"x" for name in names}})
        write_files(overrides.files, model)
    except InvalidArgument:
        pass
    else:
        written = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()}
        assert written == {posixpath.normpath(name.lstrip("/")) for name in names}
    assert [path.name for path in root.iterdir()] == ["model"]


def test_a_directory_that_is_a_file_is_refused_in_tritons_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        write_files({"1/model.py": b"", "1/model.py/x": b""}, tmp_path)
    assert caught.value.message == "Invalid file parameter 'file:1/model.py/x', directory has been created as a file"
    with pytest.raises(InvalidArgument, match="'file:1', it is another's directory"):
        write_files({"1": b""}, tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written"):
        write_files({name: b""}, tmp_path)
