"""Models of TorchServe and MLServer: the repository that is written is served, and judged by the library itself."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Server, ServerOptions
from headrace_cli import main
from headrace_migrate.report import Report, Verdict
from headrace_migrate.torchserve_properties import read_properties


def archive(path: Path, model: Any, files: dict[str, bytes]) -> Path:
    """Write what torch-model-archiver writes: a zip file with a manifest."""
    with zipfile.ZipFile(path, "w") as mar:
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"createdOn": "x", "runtime": "python", "model": model}))
        for name, content in files.items():
            mar.writestr(name, content)
    return path


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_with_the_image_classifier_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    pool = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    torch.jit.script(pool).save(str(tmp_path / "mean.pt"))
    model = {"modelName": "mean", "handler": "image_classifier", "modelVersion": "1.0", "serializedFile": "mean.pt",
             "configFile": "model-config.yaml"}  # fmt: skip
    settings = b"minWorkers: 2\nbatchSize: 4\nmaxBatchDelay: 7\nresponseTimeout: 120\n"
    mar = archive(
        tmp_path / "m.mar", model, {"mean.pt": (tmp_path / "mean.pt").read_bytes(), "model-config.yaml": settings}
    )
    assert main(["migrate", str(mar), "--write", str(tmp_path / "models"), "--format=json"]) == 1
    findings = {each["name"]: each["verdict"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert findings == {
        "mean": "as it is", "m.mar": "needs", "mean.pt": "needs", "image_classifier": "differs",
        "minWorkers: 2": "changed", "batchSize: 4": "changed", "maxBatchDelay: 7": "changed",
        "responseTimeout: 120": "differs",
    }  # fmt: skip
    images = np.random.default_rng(0).normal(size=(3, 3, 224, 224)).astype(np.float32)
    with Server(tmp_path / "models") as server:
        found = server.infer("mean", {"INPUT__0": images}).outputs["OUTPUT__0"]
    np.testing.assert_allclose(np.asarray(found), images.mean((2, 3)), atol=1e-6)
    config = (tmp_path / "models/mean/config.pbtxt").read_text()
    assert "max_queue_delay_microseconds: 7000" in config
    assert "count: 2" in config


def test_an_sklearn_model_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    joblib, linear_model = pytest.importorskip("joblib"), pytest.importorskip("sklearn.linear_model")
    random = np.random.default_rng(0)
    rows = random.normal(size=(40, 3)).astype(np.float32)
    classifier = linear_model.LogisticRegression().fit(rows, (rows.sum(1) > 0).astype(np.int64))
    folder = tmp_path / "mlserver" / "income"
    folder.mkdir(parents=True)
    joblib.dump(classifier, folder / "model.joblib")
    settings = {"name": "income", "implementation": "mlserver_sklearn.SKLearnModel", "max_batch_size": 8,
                "max_batch_time": 0.01, "parameters": {"uri": "./model.joblib", "version": "v1"}}  # fmt: skip
    (folder / "model-settings.json").write_text(json.dumps(settings))
    (tmp_path / "mlserver" / "settings.json").write_text('{"http_port": 8090, "debug": true}')
    assert main(["migrate", str(tmp_path / "mlserver"), "--write", str(tmp_path / "models")]) == 1
    assert "now --http-port=8090" in capsys.readouterr().out
    threads = {"python": {"isolation": "thread"}}
    options = ServerOptions(model_repository=(str(tmp_path / "models"),), backend_config=threads)
    with Server(options) as server:
        found = server.infer("income", {"predict": rows[:5]}).outputs
    np.testing.assert_array_equal(np.asarray(found["predict"]), classifier.predict(rows[:5]).reshape(-1, 1))
    np.testing.assert_allclose(np.asarray(found["predict_proba"]), classifier.predict_proba(rows[:5]))
    assert np.asarray(found["predict"]).dtype == np.int64


@pytest.mark.parametrize(
    ("model", "verdicts"),
    [
        (
            {"modelName": "m", "handler": "my_handler.py:handle", "serializedFile": "m.pt"},
            {"my_handler.py:handle": "not there"},
        ),
        ({"modelName": "m", "handler": "base_handler", "serializedFile": "m.pt"}, {"base_handler": "not there"}),
        ({"modelName": "m", "handler": "my_handler"}, {"serializedFile": "not there"}),
    ],
)
def test_a_flag_without_equivalent_is_reported_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Any, verdicts: dict[str, str]
) -> None:
    mar = archive(tmp_path / "m.mar", model, {"m.pt": b"x"})
    assert main(["migrate", str(mar), "--write", str(tmp_path / "models"), "--format=json"]) == 1
    findings = {each["name"]: each["verdict"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert verdicts.items() <= findings.items()
    assert not (tmp_path / "models").exists()


def test_a_file_name_is_data_in_the_model(tmp_path: Path) -> None:
    name = 'a"); print("b.joblib'
    (tmp_path / name).touch()
    settings = {"name": "m", "implementation": "mlserver_sklearn.SKLearnModel", "parameters": {"uri": name}}
    (tmp_path / "model-settings.json").write_text(json.dumps(settings))
    main(["migrate", str(tmp_path), "--write", str(tmp_path / "new")])
    assert f"with_name({name!r})" in (tmp_path / "new" / "m" / "1" / "model.py").read_text()


@pytest.mark.parametrize(
    "implementation", ["mlserver_xgboost.XGBoostModel", "mlserver_huggingface.HuggingFaceRuntime", "models.Mine"]
)
def test_other_runtimes_of_mlserver_are_unsupported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], implementation: str
) -> None:
    (tmp_path / "model-settings.json").write_text(json.dumps({"name": "m", "implementation": implementation}))
    assert main(["migrate", str(tmp_path), "--format=json", "--write", str(tmp_path / "new")]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["name"], each["verdict"]) for each in findings] == [("m", "as it is"), (implementation, "not there")]
    assert not (tmp_path / "new").exists()


def test_properties_become_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.properties"
    file.write_text(
        "# TorchServe\ninference_address=http://0.0.0.0:8085\nmanagement_address=http://127.0.0.1:8081\n"
        "metrics_address=http://0.0.0.0:8082\ngrpc_inference_port=7070\nmodel_store=/srv/a b;c\nload_models=all\n"
        "number_of_netty_threads=32\njob_queue_size=100\n"
    )
    assert main(["migrate", str(file)]) == 1
    flags = capsys.readouterr().out.splitlines()[-1]
    assert flags == (
        "headrace serve --http-address=0.0.0.0 --http-port=8085 --metrics-address=0.0.0.0 --metrics-port=8082 "
        "--grpc-port=7070 '--model-repository=/srv/a b;c'"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("inference_address=http://0.0.0.0:99999", "not taken over: Provided option value is out of bound. Got 99999"),
        ("metrics_address=http://0.0.0.0:80a", "not taken over: Invalid option value. Got 80a"),
        ("inference_address=unix:/tmp/x", "not taken over: expected http://HOST:PORT or https://HOST:PORT"),
        ("grpc_inference_port=abc", "not taken over: Invalid option value. Got abc"),
        ("max_request_size=-5", "not taken over: Error: --http-max-input-size must be greater than 0."),
        ("model_store=", "not taken over: it has no value"),
        (
            "grpc_inference_port=8000",
            "the server does not start: The server cannot listen to HTTP requests and GRPC requests at the same",
        ),
    ],
)
def test_a_value_that_no_flag_accepts_is_reported(line: str, expected: str) -> None:
    report = Report("config.properties")
    command = read_properties(f"{line}\n", report)
    (finding,) = (each for each in report.findings if each.verdict is Verdict.DIFFERS)
    assert finding.detail.startswith(expected)
    if expected.startswith("not taken over"):
        assert command == "headrace serve --model-repository=models\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("m.mar", b"no zip", "no archive of TorchServe"),
        ("m.mar", None, "No such file"),
        ("config.properties", b"nonsense\n", ":1: 'nonsense' is no property"),
        ("config.properties", b"# nothing\n", "empty"),
        ("model-settings.json", b"{", "no JSON"),
        ("model-settings.json", b"[]", "expected a JSON object"),
        *(
            ("model-settings.json", b'{"implementation": "mlserver_sklearn.SKLearnModel", %s}' % wrong, expected)
            for wrong, expected in (
                (b'"max_batch_time": NaN', "'max_batch_time' is nan, expected a number from 0 to 3600"),
                (b'"max_batch_time": 1e400', "'max_batch_time' is inf"),
                (b'"max_batch_size": -1', "'max_batch_size' is -1"),
                (b'"parallel_workers": 1e3', "'parallel_workers' is 1000.0"),
            )
        ),
        (
            "model-settings.json",
            b'{"name": "a/b", "implementation": "mlserver_sklearn.SKLearnModel"}',
            "no name of a model",
        ),
    ],
)
def test_bad_models_are_refused_with_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, expected: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.joblib").touch()
    source = tmp_path if name == "model-settings.json" else tmp_path / name
    assert main(["migrate", str(source), "--write", str(tmp_path / "new")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()
