"""``headrace migrate`` on deployments like public ones: its findings, and the lines that it changes.

The oracles are the rules of the server's own command line, PyYAML's loader, and the texts byte for byte.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_cli import main
from headrace_migrate.deployments import migrate_text
from headrace_migrate.dockerfile_syntax import read_instructions
from headrace_migrate.report import BadInput, Report, Verdict
from headrace_migrate.server_flags import FlagReview
from headrace_migrate.shell_words import simple_commands
from headrace_testing import CommandConformance

HERE = Path(__file__).parent / "deployments"
DOCS = Path(__file__).parents[3] / "docs"
#: The lines that are taken out of each deployment (-) and put in (+), without their indents.
CHANGES = {
    "deployment.yaml": """
        - image: nvcr.io/nvidia/tritonserver:24.05-py3
        + image: acme/headrace:1
        - - --model-namespacing=true""",
    "shell_in_args.yaml": """
        - image: "nvcr.io/nvidia/tritonserver:20.11-py3"
        + image: "acme/headrace:1"
        - - LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$EXTRA_PATHS" bin/tritonserver --model-store=gs://acme/models --strict-model-config=false --model-namespacing true
        + - LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$EXTRA_PATHS" /opt/tritonserver/bin/tritonserver --model-store=gs://acme/models --strict-model-config=false""",  # noqa: E501
    "pod_block_script.yaml": """
        - image: registry.acme.example/mirror/nvidia/tritonserver:23.10-py3
        + image: acme/headrace:1
        - --model-namespacing=true \\""",
    "serving_runtime.yaml": """
        - image: nvcr.io/nvidia/tritonserver:23.05-py3
        + image: acme/headrace:1""",
    "inference_service.yaml": "",
    "compose.yaml": """
        - image: nvcr.io/nvidia/tritonserver:22.12-py3
        + image: acme/headrace:1""",
    "values.yaml": """
        - imageName: nvcr.io/nvidia/tritonserver:24.12-py3
        + imageName: acme/headrace:1
        - - '--model-namespacing=true'   # remove when teams are split
        - repository: nvcr.io/nvidia/tritonserver
        - tag: 24.12-py3
        + repository: acme/headrace
        + tag: 1""",
    "vllm.yaml": """
        - image: nvcr.io/nvidia/tritonserver:24.07-vllm-python-py3
        + image: acme/headrace:1""",
    "openai.sh": """
        - docker run --rm --gpus=all -v /llm:/llm nvcr.io/nvidia/tritonserver:24.12-vllm-python-py3 \\
        - python3 openai_frontend/main.py --model-repository /llm --tokenizer acme/llama \\
        - --openai-restricted-api inference,model-repository,metrics x-key "$KEY" \\
        - --tool-call-parser=llama3 --kserve-http-port "$PORT" --new-flag
        + docker run --rm --gpus=all -v /llm:/llm acme/headrace:1 \\
        + headrace serve --model-repository=/llm "--http-restricted-api=inference,metadata:x-key=$KEY" "--http-port=$PORT" --openai-port=9000 --allow-http=false --allow-grpc=false""",  # noqa: E501
    "Dockerfile.simple": """
        - FROM nvcr.io/nvidia/tritonserver:23.12-py3
        + FROM acme/headrace:1
        - CMD ["tritonserver", "--model-repository=/models", "--log-warning=True", "--model-namespacing=true"]
        + CMD ["tritonserver", "--model-repository=/models", "--log-warning=True"]""",
    "Dockerfile.stages": """
        - ARG TRITON=nvcr.io/nvidia/tritonserver:24.04-py3
        + ARG TRITON=acme/headrace:1
        - ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "tritonserver"]
        + ENTRYPOINT ["tritonserver"]""",
    "Dockerfile.shell": """
        - from nvcr.io/nvidia/tritonserver:20.11-py3
        + from acme/headrace:1
        - --strict-model-config=false --model-namespacing=true `
        + --strict-model-config=false `""",
    "run.sh": """
        - nvcr.io/nvidia/tritonserver:22.07-py3 tritonserver --model-repository=/models --model-namespacing=true \\
        + acme/headrace:1 tritonserver --model-repository=/models \\""",
    "entry.sh": "",
}
#: The expected findings besides "as it is": the start of the name, and the verdict.
SAID = {
    "deployment.yaml": "--model-repository=s3 needs|--model-namespacing not there|--http-thread-count differs|"
    "LD_PRELOAD differs|curl differs|nvidia.com/gpu needs",
    "shell_in_args.yaml": "--model-store=gs needs|--model-namespacing not there|bin/tritonserver changed",
    "pod_block_script.yaml": "--cache-config=redis needs|--trace-config needs|--model-namespacing not there|"
    "--backend-config=python,shm differs",
    "serving_runtime.yaml": "onnx needs|pytorch needs",
    "inference_service.yaml": "triton differs|kserve-tritonserver differs|nvidia.com/gpu needs",
    "compose.yaml": "CMD curl differs|devices needs",
    "values.yaml": "--model-namespacing not there",
    "vllm.yaml": "mpirun not there|nvcr.io/nvidia/tritonserver:24.07-trtllm not there|registry.acme differs",
    "openai.sh": "--gpus needs|metrics differs|--tool-call-parser differs|--new-flag not there",
    "Dockerfile.simple": "--model-namespacing not there",
    "Dockerfile.stages": "COPY backends differs|LD_PRELOAD differs|"
    "--interval differs|/opt/nvidia changed|triton-server changed",
    "Dockerfile.shell": "--model-namespacing not there",
    "run.sh": "--gpus needs|--model-namespacing not there",
    "entry.sh": "--allow-vertex-ai needs|--http-header-forward-pattern needs",
}


class TestMigrate(CommandConformance):
    plugin, command = "headrace_migrate", "migrate"
    good = ("tritonserver --model-repository=/models",)


def migrated(text: str, name: str = "x", image: str = "acme/headrace:1") -> Report:
    report = Report(name)
    migrate_text(text, report, image)
    return report


def test_every_deployment_is_reviewed() -> None:
    assert {path.name for path in HERE.iterdir()} == set(CHANGES) == set(SAID)


@pytest.mark.parametrize("name", CHANGES)
def test_only_these_lines_change(name: str) -> None:
    old = (HERE / name).read_bytes().decode()
    report = migrated(old, name)
    assert report.new is not None
    lines = difflib.ndiff(old.splitlines(), report.new.splitlines())
    found = [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "+-"]
    assert sorted(found) == sorted(line.strip() for line in CHANGES[name].strip().splitlines())
    windows = migrated(old.replace("\n", "\r\n"), name)
    assert windows.new == report.new.replace("\n", "\r\n")


@pytest.mark.parametrize("name", SAID)
def test_the_messages(name: str) -> None:
    report = migrated((HERE / name).read_text(), name)
    wanted = [case.rsplit(" ", 2 if case.endswith("not there") else 1) for case in SAID[name].split("|")]
    for words in wanted:
        verdict = Verdict(" ".join(words[1:]))
        matching = [each for each in report.findings if words[0] in each.name and each.verdict is verdict]
        assert matching, (words, report.findings)
    others = {each.name for each in report.findings if each.verdict not in (Verdict.AS_IT_IS, Verdict.CHANGED)}
    assert all(any(words[0] in name for words in wanted) for name in others), others
    differs = any(case.endswith(("differs", "not there")) for case in SAID[name].split("|"))
    assert report.exit_code == int(differs)


@pytest.mark.parametrize("name", [name for name in CHANGES if name.endswith(".yaml")])
def test_the_new_manifest_changes_only_images_and_commands(name: str) -> None:
    def other(value: Any) -> Any:
        if isinstance(value, dict):
            drop = {"image", "imageName", "args", "command", "serverArgs", "repository", "tag"}
            return {key: other(each) for key, each in value.items() if key not in drop}
        return [other(each) for each in value] if isinstance(value, list) else value

    old = (HERE / name).read_text()
    new = migrated(old, name).new or ""
    assert other(list(yaml.safe_load_all(new))) == other(list(yaml.safe_load_all(old)))


TRITON = "nvcr.io/nvidia/tritonserver:24.04-py3"


@pytest.mark.parametrize(
    ("lines", "expected", "new"),
    [
        (
            'ENTRYPOINT ["tritonserver"]|CMD --model-repository=/m --nope',
            {"CMD --model-repository=/m --nope": "differs: tritonserver gets the arguments /bin/sh -c", "--nope": ""},
            None,
        ),
        (
            'ENTRYPOINT ["/bin/sh", "-c"]|CMD tritonserver --nope',
            {"CMD tritonserver --nope": "differs: /bin/sh gets the arguments /bin/sh -c", "--nope": ""},
            None,
        ),
        ('ENTRYPOINT ["/bin/sh", "-c"]|CMD ["tritonserver --nope"]', {"--nope": "not there"}, None),
        ('ENTRYPOINT ["tini", "--"]|CMD tritonserver --nope', {"--nope": "not there"}, None),
        (
            'ENTRYPOINT tritonserver --id=x|CMD ["--nope"]',
            {'CMD ["--nope"]': "as it is: no effect: ENTRYPOINT is in shell form", "--id=x": "as it is", "--nope": ""},
            None,
        ),
        ('CMD ["--nope"]|ENTRYPOINT ["tritonserver"]', {"--nope": "not there"}, None),
        ('CMD ["tritonserver", "--nope"]|CMD ["tritonserver"]', {"--nope": ""}, None),
        (
            "CMD ['tritonserver', '--nope']",
            {"CMD ['tritonserver', '--nope']": "differs: no JSON: it runs in a shell, with the brackets"},
            None,
        ),
        (
            'ENTRYPOINT ["tritonserver"]|CMD ["--nope"]|FROM below|CMD ["--id=x"]',
            {"--id=x": "as it is", "--nope": ""},
            None,
        ),
        ('CMD ["--nope"]|FROM below|ENTRYPOINT ["tritonserver"]', {"tritonserver": "as it is", "--nope": ""}, None),
        (
            'ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]|EXPOSE 8000|CMD ["tritonserver", "--nope"]',
            {"--nope": "not there", "/opt/nvidia/nvidia_entrypoint.sh": "changed"},
            'ENTRYPOINT []|EXPOSE 8000|CMD ["tritonserver", "--nope"]',
        ),
        (
            'ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]|CMD tritonserver --nope',
            {"--nope": "not there", "/opt/nvidia/nvidia_entrypoint.sh": "changed"},
            "ENTRYPOINT []|CMD tritonserver --nope",
        ),
    ],
)  # fmt: skip
def test_entrypoint_and_cmd_are_read_as_docker_runs_them(lines: str, expected: dict[str, str], new: str | None) -> None:
    """Docker's Dockerfile reference, "Understand how CMD and ENTRYPOINT interact". Empty: no finding."""
    report = migrated(f"FROM {TRITON} AS below\n" + lines.replace("|", "\n") + "\n")
    findings = {each.name: f"{each.verdict.value}: {each.detail}" for each in report.findings}
    for name, words in expected.items():
        assert findings.get(name, "").startswith(words) if words else name not in findings
    assert report.new == f"FROM acme/headrace:1 AS below\n{(new or lines)}\n".replace("|", "\n")


def test_the_new_dockerfile_installs_what_the_models_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m" / "net" / "1").mkdir(parents=True)
    (tmp_path / "m" / "net" / "1" / "model.onnx").touch()
    (tmp_path / "m" / "all").mkdir()
    (tmp_path / "m" / "all" / "1").mkdir()
    (tmp_path / "m" / "all" / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 0 input { name: "A" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "B" data_type: TYPE_FP32 dims: 1 } ensemble_scheduling { step { model_name: "net" '
        'model_version: -1 input_map { key: "X" value: "A" } output_map { key: "Y" value: "B" } } }'
    )
    source, target = HERE / "Dockerfile.stages", tmp_path / "Dockerfile"
    code = main(["migrate", str(source), "--repository", str(tmp_path / "m"), "--write", str(target)])
    assert code == 1
    assert "pip install headrace headrace-ensemble headrace-onnx headrace-tritonserver" in capsys.readouterr().out
    new = target.read_text()
    assert "ARG TRITON=python:3.12-slim-bookworm" in new
    stage = new.partition("FROM ${TRITON} AS server\n")[2].splitlines()
    assert stage[:4] == [
        "RUN pip install --no-cache-dir headrace headrace-ensemble headrace-onnx headrace-tritonserver \\",
        "    && mkdir -p /opt/tritonserver && ln -s /usr/local/bin /opt/tritonserver/bin \\",
        "    && useradd --uid 1000 --create-home triton-server",
        "WORKDIR /opt/tritonserver",
    ]
    assert [each.name for each in read_instructions(new)].count("FROM") == 2
    assert main(["migrate", str(source), "--write", str(target)]) == 2  # nothing is overwritten
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected", "new"),
    [
        ("", {}, "--openai-port=9000 --allow-http=false --allow-grpc=false"),
        (
            "--enable-kserve-frontends --openai-port=9001 --kserve-grpc-port 81 --lora-separator=-",
            {"--openai-port=9001": "as it is", "--enable-kserve-frontends": "changed: left out: the default"},
            "--openai-port=9001 --grpc-port=81 --openai-lora-separator=-",
        ),
        (
            "--host ::1 --openai-p 1 --enable --tritonserver-log-verbose-level 2",  # prefixes, as argparse takes them
            {"--host ::1": "changed: now --http-address=::1"},
            "--http-address=::1 --grpc-address=::1 --openai-port=1 --log-verbose=2",
        ),
        ("--enable --openai-port", {"--openai-port": "not there: it has 0 values, expected 1"}, "--openai-port=9000"),
        ("--enable --openai-port=1 --kserve-http-port 80000",
         {"--http-port=80000": "not there: the server does not start: "}, "--openai-port=1 --http-port=80000"),
        ("--enable --openai-port=1 --backend tensorrtllm", {"--backend tensorrtllm": "not there"}, "--openai-port=1"),
        ("--enable --openai-port=1 --backend vllm stray", {"--backend vllm stray": "not there"}, "--openai-port=1"),
    ],
)  # fmt: skip
def test_tritons_openai_frontend(words: str, expected: dict[str, str], new: str) -> None:
    report = migrated(f"python3 /opt/tritonserver/python/openai/openai_frontend/main.py {words}".strip())
    findings = {each.name: f"{each.verdict.value}: {each.detail}" for each in report.findings}
    for name, start in expected.items():
        assert findings[name].startswith(start), findings
    assert report.new == f"headrace serve {new}"
    assert "headrace-openai" in report.distributions


def test_a_command_as_a_list_is_not_replaced() -> None:
    """A new command with another number of words is reported, and the list stays."""
    lines = f'FROM {TRITON}\nCMD ["python3", "openai_frontend/main.py", "--model-repository", "/m"]\n'
    report = migrated(lines)
    assert report.new == lines.replace(TRITON, "acme/headrace:1")
    (program,) = [each for each in report.findings if each.kind == "program"]
    assert program.verdict is Verdict.DIFFERS
    assert program.detail.startswith("write headrace serve --model-repository=/m --openai-port=9000")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model-repo=/m", {"--model-repo=/m": "as it is"}),  # a prefix, which getopt_long accepts
        ("--model-repository /m --id x", {"--model-repository /m": "as it is", "--id x": "as it is"}),
        ("--model-repository=/m --colour=red", {"--colour=red": "not there"}),
        ("--model-repository=/m --model=1", {"--model=1": "not there"}),
        ("--model-repository=/m --http-port=80x0", {"--http-port=80x0": "differs"}),
        ("--model-repository=/m --load-model=a", {"--load-model=a": "as it is", "--load-model=a ": "not there"}),
        ("--model-repository=/m --model-namespacing=false", {"--model-namespacing=false": "as it is"}),
        ("--model-repository=/m --http-thread-count=8", {"--http-thread-count=8": "as it is"}),
        ("--model-repository=hdfs://x", {"--model-repository=hdfs://x": "not there"}),
        ("--model-repository=/m --log-file", {"--log-file": "not there"}),
        ("--model-repository=/m stray", {"stray": "not there"}),
        ("--model-repository=/m --backend-directory=/b", {"--backend-directory=/b": "differs"}),
        ("--model-repository=/m --backend-config=tensorflow,version=2", {"--backend-config=tensorflow": "needs"}),
    ],
)
def test_flags(words: str, expected: dict[str, str]) -> None:
    report = migrated(f"tritonserver {words}")
    for name, verdict in expected.items():
        found = [each for each in report.findings if each.name.startswith(name.strip())]
        found += [each for each in report.findings if each.kind == "flags" and name.strip() in each.name]
        assert verdict in {each.verdict.value for each in found}, (name, report.findings)


def test_every_named_page_and_anchor_exists() -> None:
    source = Path(FlagReview.__init__.__code__.co_filename).parent
    named = {place for path in source.glob("*.py") for place in re.findall(r'"docs/([\w#.-]+)"', path.read_text())}
    report = Report("flags")
    from headrace import Serve

    words = [f"--{flag.name}=$X" if flag.argument else f"--{flag.name}" for flag in Serve.flags()]
    FlagReview(report).read(words, [1] * len(words))
    named |= {each.docs.removeprefix("docs/") for each in report.findings if each.docs}
    assert len(named) > 20
    for place in named:
        page, _, anchor = place.partition("#")
        heads = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}
        assert not anchor or anchor in slugs, place


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + at)}: &{chr(98 + at)} [{','.join([f'*{chr(97 + at)}'] * 9)}]\n" for at in range(20)
)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.yaml", b"\n# nothing\n", "empty"),
        ("binary", b"\x7fELF\xff\xfe", "no text in UTF-8"),
        ("nul.yaml", b"kind: Pod\0", "NUL at offset 9"),
        ("none.yaml", b"kind: ConfigMap\ndata: {a: b}\n", "nothing of Triton is in this manifest"),
        ("broken.yaml", b"kind: Pod\nspec: [\n", "broken.yaml:3:1: no YAML"),
        ("bomb.yaml", BOMB.encode(), "nothing of Triton"),
        ("merge.yaml", ("a: &a {x: 1}\n" + "".join(f"b{at}: &b{at}\n  <<: [*{'a' if not at else f'b{at - 1}'},*a]\n"
                        for at in range(500))).encode(), "nothing of Triton"),
        ("cycle.yaml", b"a: &a\n  <<: *a\n  image: [*a]\n", "nothing of Triton"),
        ("deep.yaml", b"a: " + b"[" * 100_000, "no YAML"),
        ("chart.yaml", b"spec:\n  image: nvcr.io/nvidia/tritonserver:{{ .Values.tag }}-py3\n", "helm template"),
        ("huge.yaml", b"a: b\n" * 900_000, "more than 4 MiB"),
        ("Dockerfile", b"FROM nvcr.io/nvidia/tritonserver:1-py3\nRUN <<EOF\nls\n", ":2: the here-document 'EOF'"),
        ("Dockerfile", b"FROM tritonserver\nINSTALL x\n", "Dockerfile:2: 'INSTALL x' is no instruction"),
        ("Dockerfile", b"FROM python:3.12\nRUN ls\n", ""),
        ("run.sh", b"\ntritonserver --id='x", "run.sh:2: a quotation mark is not closed: 'x"),
        ("Dockerfile", b"FROM tritonserver\nRUN ls\nCMD tritonserver \\\n --id='x\n", "Dockerfile:4: a quotation mark"),
        ("Dockerfile", b"FROM tritonserver\nENV A=1 \\\n B='x\n", "Dockerfile:3: a quotation mark is not closed: 'x"),
        ("pod.yaml", b"image: tritonserver\ncontainers:\n- command: [sh, -c, \"tritonserver 'x\"]\n",
         "pod.yaml:3: a quotation mark is not closed: 'x"),
        ("run.sh", b"tritonserver --id=$(x", "'$(' is not closed"),
        ("run.sh", b"echo hello\n", "nothing of Triton"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code = main(["migrate", str(tmp_path / name), "--write", str(tmp_path / "new")])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert expected in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_unreadable_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = threading.Timer(5, os._exit, (3,))  # a FIFO must not block
    done.start()
    assert main(["migrate", str(tmp_path / "fifo")]) == 2
    done.cancel()
    assert main(["migrate", str(tmp_path / "nowhere")]) == 2
    assert main(["migrate", str(tmp_path)]) == 2
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "no regular file", "No such file or directory", "Is a directory",
    ]  # fmt: skip


def test_json_output_has_the_same_content(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--format=json", "--", "tritonserver", "--model-store=/m", "--http-thread-count=2"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["new"] == "tritonserver --model-store=/m --http-thread-count=2"
    assert [each["verdict"] for each in report["findings"]] == ["as it is", "as it is", "differs"]
    assert report["runs_as_it_is"] is False


def test_words_of_a_shell() -> None:
    text = "A=1 x 'a b'\\''c' \"d $(e; f) \\\" g\" # no\n  y>out 2>&1 &&z \\\n -w <<EOF\nit's\nEOF\nlast"
    found = [[(word.text, word.line) for word in words] for words in simple_commands(text)]
    assert found == [
        [("A=1", 1), ("x", 1), ("a b'c", 1), ('d $(e; f) " g', 1)],
        [("y", 2)],
        [("z", 2), ("-w", 3)],
        [("last", 6)],
    ]


def test_a_dockerfile_keeps_its_paths() -> None:
    text = (HERE / "Dockerfile.stages").read_text()
    for each in read_instructions(text):
        assert text[each.start :].startswith(each.body.split()[0])
        assert text.splitlines()[each.line - 1].upper().startswith(each.name)
    with pytest.raises(BadInput, match="'what' is no instruction") as refused:
        list(read_instructions("what"))
    assert refused.value.line == 1
