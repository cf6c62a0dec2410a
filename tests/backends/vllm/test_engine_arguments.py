"""The files of a model for vLLM: read, and refused with the member at fault. Needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import ConfigError, Device, LoadError, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_vllm.engine_arguments import MAX_BYTES, check_known, read_engine_arguments
from headrace_vllm.engine_start import gpus_of
from headrace_vllm.parameters import Parameters


def model(path: Path, device: Device | None = None, is_sent: bool = False, **parameters: Any) -> Model:
    config = ModelConfig(name="m")
    return Model("m", 1, path, config, Parameters(**parameters), device=device or Device(), is_sent=is_sent)


def write(path: Path, name: str = "model.json", **members: Any) -> Path:
    (path / name).write_text(json.dumps(members))
    return path


def test_a_path_of_the_version_becomes_absolute_and_a_name_of_hugging_face_stays(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    write(tmp_path, model="weights", tokenizer="org/tokenizer", max_model_len=128)
    found = read_engine_arguments(model(tmp_path)).members
    assert found["model"] == str(tmp_path / "weights")
    assert (found["tokenizer"], found["max_model_len"], found["served_model_name"]) == ("org/tokenizer", 128, "m")


def test_a_version_may_hold_the_model_itself(tmp_path: Path) -> None:
    write(tmp_path, "config.json", architectures=["LlamaForCausalLM"])
    assert read_engine_arguments(model(tmp_path)).members["model"] == str(tmp_path)


def test_an_older_argument_of_many_repositories_is_understood(tmp_path: Path) -> None:
    write(tmp_path, model="org/m", disable_log_requests="true")
    found = read_engine_arguments(model(tmp_path)).members
    assert "disable_log_requests" not in found
    assert found["enable_log_requests"] is False


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "has no member 'model'"),
        ('{"model": 7}', "has no member 'model'"),
        ('{"model": "a", "trust_remote_code": true}', "set the parameter trust to true"),
        ('{"model": "a", "enable_lora": true}', "no file .*multi_lora.json"),
        (" " * (MAX_BYTES + 1), f"more than {MAX_BYTES} bytes"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises((ConfigError, LoadError), match=told):
        read_engine_arguments(model(tmp_path))


def test_a_version_without_either_file_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"neither 'model.json'.* nor 'config.json'"):
        read_engine_arguments(model(tmp_path))


def test_code_of_the_model_is_allowed_by_a_parameter(tmp_path: Path) -> None:
    write(tmp_path, model="org/m", trust_remote_code=True)
    assert read_engine_arguments(model(tmp_path, trust=True)).members["trust_remote_code"] is True


def test_adapters_keep_their_order_and_their_paths_are_found_in_the_version(tmp_path: Path) -> None:
    (tmp_path / "french").mkdir()
    write(tmp_path, model="org/m", enable_lora=True)
    write(tmp_path, "multi_lora.json", second="org/second", first="french")
    found = read_engine_arguments(model(tmp_path)).adapters
    assert list(found.items()) == [("second", "org/second"), ("first", str(tmp_path / "french"))]
    write(tmp_path, "multi_lora.json", first=7)
    with pytest.raises(ConfigError, match="must map names of adapters to directories, got 'first': 7"):
        read_engine_arguments(model(tmp_path))


@pytest.mark.parametrize(
    "members",
    [
        {"model": "/etc"},
        {"model": ".", "tokenizer": "../other"},
        {"model": ".", "worker_extension_cls": "os.system"},
        {"model": ".", "allowed_local_media_path": "/"},
        {"model": ".", "download_dir": "/tmp"},
    ],
)
def test_files_that_came_with_a_load_request_stay_in_the_version(tmp_path: Path, members: dict[str, Any]) -> None:
    write(tmp_path, **members)
    read_engine_arguments(model(tmp_path))
    with pytest.raises(ConfigError, match="came with a load request"):
        read_engine_arguments(model(tmp_path, is_sent=True))


def test_adapters_that_came_with_a_load_request_stay_in_the_version(tmp_path: Path) -> None:
    write(tmp_path, model=".", enable_lora=True)
    write(tmp_path, "multi_lora.json", it="/etc")
    with pytest.raises(ConfigError, match=r"'it' in 'multi_lora.json'.* came with a load request"):
        read_engine_arguments(model(tmp_path, is_sent=True))


def test_an_unknown_argument_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    arguments = read_engine_arguments(model(write(tmp_path, model="org/m", max_modellen=7)))
    with pytest.raises(ConfigError, match=r"'max_modellen', which is no argument .*did you mean 'max_model_len'"):
        check_known(model(tmp_path), arguments, ["model", "served_model_name", "max_model_len"])
    check_known(model(tmp_path), arguments, ["model", "served_model_name", "max_modellen"])


def test_an_engine_gets_the_gpus_of_its_group(tmp_path: Path) -> None:
    one = read_engine_arguments(model(write(tmp_path, model="org/m")))
    assert gpus_of(model(tmp_path), one) == ()
    assert gpus_of(model(tmp_path, Device("gpu", 2)), one) == (2,)
    assert gpus_of(model(tmp_path, Device("model"), gpu_device_ids="3, 1"), one) == (3, 1)
    two = read_engine_arguments(model(write(tmp_path, model="org/m", tensor_parallel_size=2)))
    with pytest.raises(ConfigError, match="KIND_GPU is currently for single-GPU models"):
        gpus_of(model(tmp_path, Device("gpu", 0)), two)
    with pytest.raises(ConfigError, match=r"names 1 GPUs, but tensor_parallel_size .* is 2"):
        gpus_of(model(tmp_path, Device("model"), gpu_device_ids="0"), two)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"gpu_device_ids": "0,x"}, "expected numbers of GPUs"),
        ({"gpu_device_ids": "-1"}, "expected numbers of GPUs"),
        ({"gpu_device_ids": "1,1"}, "names a GPU twice"),
        ({"max_streams": 0}, "max_streams is 0"),
        ({"task": "classification"}, "expected one of generation, embedding, reranking"),
    ],
)
def test_a_wrong_parameter_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Parameters(**wrong)
