"""``headrace batch``: each row of a file is answered once, as the engine called directly answers it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.json
import pyarrow.parquet
import pytest

from headrace_batch import row_files
from headrace_batch.batch_command import ENDINGS
from headrace_batch.csv_quotes import line_of_open_quote
from headrace_cli import main
from headrace_testing import CommandConformance

EXAMPLES = Path(__file__).parents[3] / "examples/models"
ROWS = 1000
IMAGES = np.random.default_rng(1).integers(0, 17, (ROWS, 8, 8)).astype(np.uint8)
Array = npt.NDArray[Any]


class TestBatchCommand(CommandConformance):
    plugin, command = "headrace_batch", "batch"
    bad = ("--model-repository=nowhere", "--model=m", "--input=no.csv", "--output=out.csv")

    @pytest.fixture(autouse=True)
    def _rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        np.save("in.npy", IMAGES[:3])

    good = (f"--model-repository={EXAMPLES}", "--model=digits", "--input=in.npy", "--output=out.npy", "--overwrite")


def test_the_help_names_all_endings() -> None:
    assert tuple(row_files.KINDS) == ENDINGS


@pytest.fixture(scope="module")
def expected() -> Array:
    session = onnxruntime.InferenceSession(EXAMPLES / "digits/1/model.onnx")
    return np.asarray(session.run(["probabilities"], {"image": IMAGES})[0])


def write(path: Path, images: Array = IMAGES) -> Path:
    count = len(images)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(images.ravel()), 64)
    table = pa.table({"id": pa.array([f"row {i}" for i in range(count)]), "image": lists})
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=300)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, 300)
    elif path.suffix == ".csv":
        pixels = {f"p{place:02d}": pa.array(images.reshape(count, 64)[:, place]) for place in range(64)}
        pa.csv.write_csv(pa.table({"id": table["id"], **pixels}), path)
    elif path.suffix == ".jsonl":
        rows = [{"id": f"row {i}", "image": image.tolist()} for i, image in enumerate(images)]
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        np.save(path, images)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a result."""
    if path.suffix == ".npy":
        return [{"probabilities": row} for row in np.load(path)]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        found = pa.csv.read_csv(path).to_pylist()
        return [{**row, "probabilities": json.loads(row["probabilities"] or "null")} for row in found]
    table = pa.parquet.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()
    return list(table.to_pylist())


def batch(source: Path, result: Path, *more: str, model: str = "digits", repository: Path = EXAMPLES) -> int:
    words = [f"--model-repository={repository}", f"--model={model}", f"--input={source}", f"--output={result}"]
    mapped = ["--map=image=p*"] if source.suffix == ".csv" and model == "digits" else []
    return main(["batch", *words, *mapped, "--chunk=128", *more])


@pytest.mark.parametrize(
    ("source", "result"), [*((kind, ".parquet") for kind in ENDINGS), *((".jsonl", kind) for kind in ENDINGS[1:])]
)
def test_every_row_has_the_result_of_the_engine(tmp_path: Path, expected: Array, source: str, result: str) -> None:
    out = tmp_path / f"out{result}"
    assert batch(write(tmp_path / f"in{source}"), out, *(["--keep="] if result == ".npy" else [])) == 0
    rows = read(out)
    np.testing.assert_allclose([row["probabilities"] for row in rows], expected, rtol=1e-5, atol=1e-6)
    assert not any(row.get("error") for row in rows)
    if ".npy" not in (source, result):
        assert [row["id"] for row in rows] == [f"row {i}" for i in range(ROWS)], "other columns are copied"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"in{source}", f"out{result}"])


def test_a_row_group_has_the_rows_of_many_parts(tmp_path: Path) -> None:
    assert batch(write(tmp_path / "in.npy"), tmp_path / "out.parquet") == 0
    assert pa.parquet.ParquetFile(tmp_path / "out.parquet").metadata.num_row_groups == 1


def test_a_wrong_row_is_recorded_and_fails_no_other(
    tmp_path: Path, expected: Array, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl")
    lines = source.read_text().split("\n\n")
    wrong = {
        3: ('{"image": ', r"the line is no JSON"),
        4: ("[1]", r"the line is a list, not an object"),
        130: ('{"image": [1, 2]}', r"input 'image': it takes shape \[8, 8\]; the row has 2 elements"),
        131: ('{"id": "no image"}', r"input 'image': a value is missing"),
        132: (json.dumps({"image": [[300] * 8] * 8}), r"input 'image': .*300"),
        133: (json.dumps({"image": [["x"] * 8] * 8}), r"input 'image': "),
        999: (json.dumps({"image": [[0.5] * 8] * 8}), r"input 'image': .*0\.5"),
    }
    for place, (line, _) in wrong.items():
        lines[place] = line
    source.write_text("\n".join(lines))
    assert batch(source, tmp_path / "out.parquet") == 3
    for place, row in enumerate(read(tmp_path / "out.parquet")):
        if place in wrong:
            assert row["probabilities"] is None
            assert re.search(wrong[place][1], row["error"]), row["error"]
        else:
            assert row["error"] is None
            np.testing.assert_allclose(row["probabilities"], expected[place], rtol=1e-5, atol=1e-6)
    assert "7 rows failed; the first: row 4: the line is no JSON" in capsys.readouterr().err


def test_wrong_text_in_a_csv_is_the_error_of_its_row(tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", IMAGES[:5])
    lines = source.read_text().splitlines()
    lines[2] = re.sub(r",\d+$", ",many", lines[2])
    lines[4] = re.sub(r",\d+$", ",", lines[4])
    source.write_text("\n".join(lines))
    assert batch(source, tmp_path / "out.csv") == 3
    errors = [row["error"] for row in read(tmp_path / "out.csv")]
    assert [bool(error) for error in errors] == [False, True, False, True, False]
    assert "many" in errors[1]


def test_a_line_of_a_csv_with_other_columns_is_the_error_of_its_row(
    tmp_path: Path, expected: Array, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also at the ends of the file, of chunks and of parsed blocks. Empty lines are no rows."""
    source = write(tmp_path / "in.csv", IMAGES[:300])
    lines = source.read_bytes().splitlines()
    short, more, text = (b"row", "has 1 values"), (b",1", "has 66 values"), (b"\xff", "column 'id': 'utf-8' codec")
    wrong = {0: short, 1: more, 127: more, 128: short, 200: text, 255: text, 298: more, 299: short}
    for place, (added, _) in wrong.items():
        line = lines[place + 1]
        lines[place + 1] = added if added == b"row" else line + added if added == b",1" else added + line[1:]
    lines[10:10] = [b"", b""]
    source.write_bytes(b"\n".join(lines))
    assert batch(source, tmp_path / "out.jsonl") == 3
    assert "8 rows failed; the first: row 1: the row has 1 values; the header has 65" in capsys.readouterr().err
    rows = read(tmp_path / "out.jsonl")
    assert len(rows) == 300
    for place, row in enumerate(rows):
        if place in wrong:
            assert (row["probabilities"], row["id"]) == (None, None)
            assert wrong[place][1] in row["error"]
        else:
            assert row["id"] == f"row {place}"
            np.testing.assert_allclose(row["probabilities"], expected[place], rtol=1e-5, atol=1e-6)


def test_a_csv_without_a_valid_line_fails_row_by_row(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,image\n" + "1,2,3\n" * 300)
    assert batch(tmp_path / "in.csv", tmp_path / "out.parquet", "--map=image=image") == 3
    assert [row["error"] for row in read(tmp_path / "out.parquet")] == ["the row has 3 values; the header has 2"] * 300


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
def test_json_has_null_for_values_that_it_cannot_express(tmp_path: Path, datatype: str) -> None:
    """The oracles are Arrow's JSON reader, and a strict one."""
    folder = tmp_path / "models/echo/1"
    folder.mkdir(parents=True)
    io = f'put {{ name: "x" data_type: TYPE_{datatype} dims: 2 }}'
    (folder.parent / "config.pbtxt").write_text(f'backend: "identity" max_batch_size: 8 in{io} out{io}')
    lines = ['{"x": [1.5, NaN], "k": {"a": [Infinity, 2]}}', '{"x": [-Infinity, 2.5]}', '{"x": [0.25, 3], "k": "NaN"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out.jsonl"
    assert batch(tmp_path / "in.jsonl", out, model="echo", repository=tmp_path / "models") == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in out.read_text().splitlines()]
    assert [row["x"] for row in rows] == [[1.5, None], [None, 2.5], [0.25, 3.0]]
    assert [row["k"] for row in rows] == [{"a": [None, 2]}, None, "NaN"]
    assert (
        batch(tmp_path / "in.jsonl", out, "--keep=", "--overwrite", model="echo", repository=tmp_path / "models") == 0
    )
    assert pyarrow.json.read_json(out)["x"].to_pylist() == [[1.5, None], [None, 2.5], [0.25, 3.0]]


@pytest.mark.parametrize("result", ["out.npy", "out.parquet"])
def test_a_job_can_end_at_the_first_error(tmp_path: Path, result: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A NumPy file has no place for an error."""
    source = write(tmp_path / "in.csv", IMAGES[:5])
    source.write_text(re.sub(r",\d+$", ",many", source.read_text(), flags=re.MULTILINE))
    more = ["--keep="] if result == "out.npy" else ["--stop-on-error"]
    assert batch(source, tmp_path / result, *more) == 1
    assert "row 1: input 'image': " in capsys.readouterr().err
    assert not (tmp_path / result).exists()


MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = [each.decode() for each in pb_utils.get_input_tensor_by_name(request, "text").as_numpy().ravel()]
        with open(os.environ["SEEN"], "a") as file:
            file.writelines(each + "\\n" for each in text)
        if "crash" in text:
            os._exit(3)
        if "wrong" in text:
            raise ValueError("a wrong text")
        time.sleep(float(os.environ.get("DELAY_S", "0")))
        said = np.array([[b"\\xff" if each == "binary" else each.upper().encode()] for each in text], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("said", said.reshape(-1, *DIMS))])
"""


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., Path]:
    """Write the model `texts`, which returns texts in capitals (default: without a batch axis)."""

    def make(max_batch_size: int = 0, isolation: str = "thread") -> Path:
        folder = tmp_path / "models/texts/1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(MODEL.replace("DIMS", "(1,)" if max_batch_size else "()"))
        (folder.parent / "config.pbtxt").write_text(
            f'backend: "python" max_batch_size: {max_batch_size} '
            'input { name: "text" data_type: TYPE_STRING dims: 1 } '
            'output { name: "said" data_type: TYPE_STRING dims: 1 } '
            f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}'
        )
        return tmp_path / "models"

    return make


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_text_goes_in_and_out(
    tmp_path: Path, texts: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, max_batch_size: int
) -> None:
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    words = ["one", "two", "wrong", "binary", "", "drei \u00e4"]
    pa.csv.write_csv(pa.table({"text": words}), tmp_path / "in.csv")
    repository = texts(max_batch_size)
    assert batch(tmp_path / "in.csv", tmp_path / "out.jsonl", model="texts", repository=repository) == 3
    rows = read(tmp_path / "out.jsonl")
    assert [row["said"] for row in rows] == ["ONE", "TWO", None, None, "", "DREI \u00c4"]
    assert "a wrong text" in rows[2]["error"]
    assert "is no text" in rows[3]["error"]


def test_a_row_that_ends_the_process_of_the_model_fails_alone(
    tmp_path: Path, texts: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setattr("headrace_batch.row_inference.PAUSE_S", 1.0)
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "{word}"}}\n' for word in ("a", "b", "crash", "c")))
    repository = texts(8, "process")
    assert batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model="texts", repository=repository) == 3
    rows = read(tmp_path / "out.jsonl")
    assert [row["said"] for row in rows] == ["A", "B", None, "C"]
    assert "exited with status 3" in rows[2]["error"]


def test_a_killed_job_resumes_without_finished_rows(
    tmp_path: Path, texts: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))
    repository = texts(8)
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "w{i}"}}\n' for i in range(400)))
    words = [
        f"--model-repository={repository}", "--model=texts", f"--input={tmp_path / 'in.jsonl'}",
        f"--output={tmp_path / 'out.jsonl'}", "--chunk=40",
    ]  # fmt: skip
    parts = tmp_path / "out.jsonl.parts"
    monkeypatch.setenv("DELAY_S", "0.02")
    with subprocess.Popen([Path(sys.executable).with_name("headrace"), "batch", *words]) as job:
        wait_until(lambda: len(list(parts.glob("*.arrow"))) >= 3, "three parts are written")
        assert main(["batch", *words]) == 1, "one process at a time writes"
        job.send_signal(signal.SIGKILL)
    finished_parts = len(list(parts.glob("*.arrow")))
    assert finished_parts < 10
    seen.write_text("")
    monkeypatch.setenv("DELAY_S", "0")
    assert main(["batch", *words]) == 0
    assert [row["said"] for row in read(tmp_path / "out.jsonl")] == [f"W{i}" for i in range(400)]
    assert len(seen.read_text().split()) == 400 - 40 * finished_parts
    assert not parts.exists()


def test_another_job_does_not_resume_from_these_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: Array
) -> None:
    source, out = write(tmp_path / "in.parquet"), tmp_path / "out.parquet"
    assert batch(source, out, "--stop-on-error", "--map=image=id") == 1  # leaves parts
    assert "row 1: input 'image'" in capsys.readouterr().err
    assert batch(source, out) == 1
    assert "of a job with another map: {'image': 'id'}, now {}; --restart begins anew" in capsys.readouterr().err
    assert batch(source, out, "--restart") == 0
    np.testing.assert_allclose([row["probabilities"] for row in read(out)], expected, rtol=1e-5, atol=1e-6)
    assert batch(source, out) == 1
    assert f"'{out}' exists; --overwrite replaces it" in capsys.readouterr().err
    assert batch(source, out, "--overwrite") == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--map=picture=id"], "--map names input 'picture'; model 'digits' has 'image'"),
        (["--map=image=imag"], r"no column 'imag' for input 'image' \(--map image=COLUMN\); did you mean 'image'\?"),
        (["--map=image=zzz"], "; the file has 'id', 'image'"),
        (["--outputs=scores"], "model 'digits' has no output 'scores'; it has probabilities"),
        (["--keep=name"], "--keep names column 'name'; the file has id, image"),
        (["--model-version=7"], "7"),
        (["--model=digit"], "failed to load all models: failed to load 'digit', .*: no model repository has it"),
        (["--output=out.txt"], "ends in '.txt'; the endings are .parquet, .arrow, .csv, .jsonl, .npy"),
        (["--output=in.parquet/out.parquet"], "cannot write 'in.parquet/out.parquet': Not a directory"),
        (["--input=in.txt"], "ends in '.txt'"),
        (["--input=none.parquet"], "cannot read '.*none.parquet'"),
        (["--input=cut.parquet"], "cannot read '.*cut.parquet'"),
        (["--input=cut.npy"], "cannot read '.*cut.npy'"),
        (["--input=pickle.npy"], "cannot read '.*pickle.npy': .*Python objects"),
        (["--input=wide.npy"], "the array has int64; input 'image' takes UINT8"),
        (["--input=flat.npy"], r"input 'image': it takes shape \[8, 8\]; the row has 63 elements"),
        (["--input=empty.jsonl"], "has no rows"),
        (["--input=open.csv"], "line 3 of 'open.csv' has a quote that is never closed"),
        (["--input=twice.parquet"], "two columns of '.*twice.parquet' have the name 'id'"),
    ],
)  # fmt: skip
def test_unsupported_requests_are_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "in.parquet")
    Path("cut.parquet").write_bytes(source.read_bytes()[:-100])
    Path("cut.npy").write_bytes(b"\x93NUMPY\x01\x00")
    np.save("pickle.npy", np.array([{}], object), allow_pickle=True)
    np.save("wide.npy", IMAGES.astype(np.int64))
    np.save("flat.npy", IMAGES.reshape(ROWS, 64)[:, :63])
    Path("empty.jsonl").write_text("\n")
    Path("open.csv").write_text('id,image\n1,2\n3,"4\n5,6\n')
    pa.parquet.write_table(pa.Table.from_arrays([pa.array([1])] * 3, ["image", "id", "id"]), "twice.parquet")
    assert batch(source, tmp_path / "out.parquet", *words) == 1
    assert re.search(why, capsys.readouterr().err)
    assert not Path("out.parquet").exists()


@pytest.mark.parametrize("value", ["many", "0", "-1"])
def test_a_wrong_number_of_rows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    with pytest.raises(SystemExit):
        batch(tmp_path / "in.npy", tmp_path / "out.npy", f"--chunk={value}")
    assert f"argument --chunk: '{value}' is no whole number from 1 on" in capsys.readouterr().err


def test_a_row_with_an_unknown_column_fails_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", IMAGES[:200])
    more = [{"image": IMAGES[0].tolist(), "label": label} for label in (3, None)]
    source.write_text(source.read_text() + "\n".join(map(json.dumps, more)))
    assert batch(source, tmp_path / "out.jsonl") == 3
    rows = read(tmp_path / "out.jsonl")
    assert [place for place, row in enumerate(rows) if "error" in row] == [200]
    assert "no row of the first chunk has column 'label'" in rows[200]["error"]
    assert batch(source, tmp_path / "all.jsonl", "--keep=label") == 0
    assert [row["label"] for row in read(tmp_path / "all.jsonl")] == [None] * 200 + [3, None]


@pytest.mark.parametrize("wrong", [(0, 1), (2,), (3,)])
def test_a_chunk_without_a_valid_row_fails_no_other_row(tmp_path: Path, wrong: tuple[int, ...]) -> None:
    lines = [json.dumps({"image": image.tolist()}) for image in IMAGES[:4]]
    for place in wrong:
        lines[place] = "no JSON" if place != 3 else "{}"
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--chunk=1") == 3
    assert tuple(place for place, row in enumerate(read(tmp_path / "out.jsonl")) if "error" in row) == wrong


def test_a_csv_line_may_be_long_and_a_text_may_have_line_ends(tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", IMAGES[:3])
    source.write_text(source.read_text().replace("row 1", "a\n" * 2_000_000))
    assert batch(source, tmp_path / "out.jsonl") == 0
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == ["row 0", "a\n" * 2_000_000, "row 2"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('a,b\n1,"two\n2,three\n', 2),
        ('a,b\n1,"two', 2),
        ('a,b\n"1\n2","3"\n4,"five ""six""\n7,8\n', 4),
        ('a,"b\n1,2\n', 1),
        ('\ufeff"a,b\n1,2\n', 1),
        ('a,b\r\n1,"\r\n', 2),
        ('a,b\n1,"""\n', 2),
        ('a,b\n1,"2"\n', 0),
        ('a,b\n1,5" pipe\n"2"x","3"\n', 0),
        ('a,b\n"1,"",\n""","""2"""\n', 0),
        ('a,b\n"",""\n', 0),
        ("", 0),
    ],
)
def test_a_quote_that_is_never_closed_is_found_where_arrow_opens_it(tmp_path: Path, text: str, line: int) -> None:
    source = tmp_path / "in.csv"
    source.write_text(text, encoding="utf-8", newline="")
    assert line_of_open_quote(source) == line
    if text:  # Arrow reads one more row if the quote is closed
        source.write_text(text + '"\n9,9\n', encoding="utf-8", newline="")
        options = pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=lambda row: "skip")
        column = pa.csv.read_csv(source, pa.csv.ReadOptions(column_names=["x", "y"]), options)["x"].to_pylist()
        assert (str(column[-1]) == "9") == (line > 0)


@pytest.mark.parametrize("result", [kind for kind in ENDINGS if kind != ".npy"])
def test_columns_of_any_type_are_copied(tmp_path: Path, result: str) -> None:
    whens = [[datetime(2026, 1, place + 1)] for place in range(4)]
    images = pa.FixedSizeListArray.from_arrays(pa.array(IMAGES[:4].ravel()), 64)
    pieces = [
        pa.table(
            {"image": images, "kind": pa.array(kinds).dictionary_encode(), "at": [{"when": each} for each in whens]}
        )
        for kinds in (["a", "b", "a", None], ["c", "d", "c", "d"])
    ]
    with pa.ipc.new_stream(tmp_path / "in.arrow", pieces[0].schema) as writer:
        for piece in pieces:
            writer.write_table(piece)
    out = tmp_path / f"out{result}"
    assert batch(tmp_path / "in.arrow", out, "--chunk=4") == 0
    rows = read(out)
    assert [row["kind"] or None for row in rows] == ["a", "b", "a", None, "c", "d", "c", "d"]
    at = json.loads(rows[1]["at"]) if result == ".csv" else rows[1]["at"]
    assert str(at["when"][0]) == "2026-01-02 00:00:00"


def test_an_output_type_that_the_file_cannot_store_is_an_error_before_the_first_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = pa.FixedSizeListArray.from_arrays(pa.array(IMAGES[:1].ravel()), 64)
    rows = pa.table({"image": images, "every": pa.array([pa.MonthDayNano([1, 2, 3])])})
    with pa.ipc.new_file(tmp_path / "in.arrow", rows.schema) as writer:
        writer.write_table(rows)
    out = tmp_path / "out.parquet"
    assert batch(tmp_path / "in.arrow", out) == 1
    stderr = capsys.readouterr().err
    assert re.search(
        f"a {out.suffix} file cannot have the columns of '{out}': .*; choose the columns by --keep", stderr
    )
    assert not list(tmp_path.glob("*.parts/*.arrow"))


def test_an_ensemble_without_instances_is_called(tmp_path: Path, expected: Array) -> None:
    (tmp_path / "models/both/1").mkdir(parents=True)
    shutil.copytree(EXAMPLES / "digits", tmp_path / "models/digits")
    (tmp_path / "models/both/config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 64 '
        'input { name: "image" data_type: TYPE_UINT8 dims: [8, 8] } '
        'output { name: "probabilities" data_type: TYPE_FP32 dims: 10 } '
        'ensemble_scheduling { step { model_name: "digits" model_version: -1 input_map { key: "image" value: "image" } '
        'output_map { key: "probabilities" value: "probabilities" } } }'
    )
    source = write(tmp_path / "in.npy")
    assert batch(source, tmp_path / "out.npy", model="both", repository=tmp_path / "models") == 0
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=1e-5, atol=1e-6)


def test_rows_of_different_shape_are_in_separate_requests(tmp_path: Path) -> None:
    folder = tmp_path / "models/echo/1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(
        'backend: "identity" max_batch_size: 8 '
        'input [{ name: "x" data_type: TYPE_FP32 dims: [-1] }, { name: "n" data_type: TYPE_INT64 dims: 1 }] '
        'output [{ name: "x" data_type: TYPE_FP32 dims: [-1] }, { name: "n" data_type: TYPE_INT64 dims: 1 }]'
    )
    lists = [[0.5] * (place % 4) for place in range(1, 300)]
    pa.parquet.write_table(pa.table({"x": lists, "n": list(range(299))}), tmp_path / "in.parquet")
    found = batch(tmp_path / "in.parquet", tmp_path / "out.parquet", model="echo", repository=tmp_path / "models")
    assert found == 0
    assert [(row["x"], row["n"]) for row in read(tmp_path / "out.parquet")] == list(zip(lists, range(299), strict=True))
