"""Keys, by the kit, by the stock clients over real sockets, and by the command."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import (
    Caller,
    ConfigError,
    ExtensionOperation,
    Operation,
    PermissionDenied,
    Unauthenticated,
)
from headrace_access import AccessOptions
from headrace_access.key_file import Key, KeyFile, new_key
from headrace_testing import InterceptorConformance, RefusedOperation
from tests.interceptors.access.access_files import ALL, TENANT, access_of, ask, keys, make

CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
BODY = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}


# ---------------------------------------------------------------------- the kit


class TestStranger(InterceptorConformance):
    plugin, interceptor = "headrace_access", "access"

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "access.json"
        self.key = make(self.path, alice=ALL)["alice"]

    def headers(self) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def options(self) -> Mapping[str, Any]:
        return {"plugin_options": [AccessOptions(keys=str(self.path))]}

    def refusals(self) -> Sequence[RefusedOperation]:
        return [RefusedOperation(Unauthenticated)]


# ---------------------------------------------------------------------- decisions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.json"


MAY = [
    (Operation.INFER, "own_1", True),
    (Operation.INFER, "other", False),
    (Operation.INFER, "Own_1", False),
    (Operation.MODEL_METADATA, "own_1", True),
    (Operation.MODEL_CONFIG, "own_1", False),
    (Operation.LOAD, "own_1", False),
    (Operation.OPEN_STREAM, "", True),
    (Operation.SERVER_METADATA, "", True),
    (Operation.INDEX, "", False),
    (Operation.STATISTICS, "", False),
    (Operation.METRICS, "", False),
    (ExtensionOperation("chat"), "own_1", True),
    (ExtensionOperation("chat"), "", False),
]


@pytest.mark.parametrize(("operation", "model", "may"), MAY, ids=lambda each: str(each))
def test_a_rule_allows_operations_on_models(path: Path, operation: Any, model: str, may: bool) -> None:
    key = make(path, tenant=TENANT)["tenant"]
    access = access_of(path)
    for _ in range(2):  # the second decision is cached
        if may:
            assert ask(access, key, operation, model).principal == "tenant"
        else:
            with pytest.raises(PermissionDenied, match=f"'tenant' may not do '{operation}'"):
                ask(access, key, operation, model)


def test_a_rule_of_everything_allows_everything(path: Path) -> None:
    key = make(path, admin=ALL)["admin"]
    access = access_of(path)
    for operation in Operation:
        ask(access, key, operation, "")
        ask(access, key, operation, "anything")


def wrong_keys(key: str) -> Iterator[tuple[str, str]]:
    other = new_key()[0]
    yield other, "it is not known"
    yield other[:12] + key[12:], "it is not known"  # the secret of one, the id of another
    yield key[:-1] + ("A" if key[-1] != "A" else "B"), "it is not known"
    for rubbish in (key[:-1], key + "A", key.upper(), key + "\0", "hr_", "ключ", "x" * 4096):
        yield rubbish, "it is no key of this server"
    yield "x" * 1_000_000, "it is too long"


def test_a_wrong_key_is_refused_without_repeating_it(path: Path) -> None:
    key = make(path, alice=ALL)["alice"]
    access = access_of(path)
    ask(access, key)
    for wrong, reason in wrong_keys(key):
        with pytest.raises(Unauthenticated) as caught:
            ask(access, wrong)
        assert caught.value.message == f"the key is refused: {reason}"
    with pytest.raises(Unauthenticated, match="needs a key"):
        ask(access, None)


@pytest.mark.parametrize(("days", "is_valid"), [(1, True), (0, False), (-1, False)])
def test_a_key_expires_on_its_day(path: Path, days: int, is_valid: bool) -> None:
    key = make(path, alice=ALL)["alice"]
    document = json.loads(path.read_text())
    day = datetime.datetime.now(datetime.timezone.utc).date() + datetime.timedelta(days)
    next(iter(document["principals"]["alice"]["keys"].values()))["expires"] = day.isoformat()
    found = KeyFile.parse(document, path).find(key)
    assert isinstance(found, Key) is is_valid
    assert is_valid or found == "it has expired"


def test_the_comparison_of_a_secret_reads_whole_digests(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: each try is one comparison of 32 bytes with 32, by `hmac.compare_digest`."""
    from headrace_access import key_file

    sizes = []

    def compare(digest: bytes, known: bytes) -> bool:
        sizes.append((len(digest), len(known)))
        return digest == known

    monkeypatch.setattr(key_file, "compare_digest", compare)
    key = make(path, alice=ALL)["alice"]
    found = KeyFile.read(path)
    for end in range(1, 43):
        found.find(key[:-end] + "A" * end)
    found.find(key)
    assert sizes == [(32, 32)] * 43


def test_the_health_of_the_server_is_open_and_other_operations_by_a_flag(path: Path) -> None:
    make(path, alice=ALL)
    ask(access_of(path), None, Operation.LIVE, "")
    with pytest.raises(Unauthenticated):  # it would reveal which models exist
        ask(access_of(path), None, Operation.MODEL_READY, "m")
    access = access_of(path, open="metrics,model_*")
    ask(access, None, Operation.METRICS, "")
    ask(access, None, Operation.MODEL_READY, "m")
    with pytest.raises(Unauthenticated):
        ask(access, None, Operation.LIVE, "")


def test_models_and_the_program_itself_need_no_key(path: Path) -> None:
    make(path, alice=ALL)
    for transport in ("program", "model"):
        assert access_of(path).admit(Caller(transport), Operation.INFER, "m") is None


def test_a_key_may_be_in_x_api_key(path: Path) -> None:
    key = make(path, alice=ALL)["alice"]
    caller = Caller("grpc", header={"x-api-key": key}.get)

    async def admit() -> None:
        assert access_of(path).admit(caller, Operation.INFER, "m") is None

    asyncio.run(admit())
    assert caller.principal == "alice"


# ---------------------------------------------------------------------- the file


def rule(**members: Any) -> Any:
    return {"principals": {"a": {"keys": {}, "allow": [{"models": ["*"], "operations": ["*"], **members}]}}}


FILES: list[tuple[Any, str]] = [
    ("", "is no JSON"),
    ("[" * 100_000, "is no JSON"),
    ([], "is no object with 'principals'"),
    ({"principals": {}, "more": 1}, "unknown member 'more'; known: principals, roles, "),
    ({"principals": []}, "principals is no object"),
    ({"principals": {"": {}}}, "principals. is no name: 1 to 256 printable"),
    ({"principals": {"a\nb": {}}}, "principals.a\\nb is no name"),
    ({"principals": {"a": 1}}, "principals.a is no object"),
    ({"principals": {"a": {"alow": []}}}, "principals.a: unknown member 'alow'; known: keys, roles, allow"),
    ({"principals": {"a": {"allow": {}}}}, "principals.a.allow is no list of rules"),
    ('{"principals": {"a": {}, "a": {}}}', "the member 'a' stands there twice"),
    ({"principals": {"a": {"roles": ["r"]}}}, "principals.a.roles: there is no role 'r'"),
    ({"principals": {"a": {"roles": "r"}}}, "principals.a.roles is no list such as"),
    ({"principals": {}, "roles": {"r": {}}}, "roles.r is no list of rules"),
    ({"principals": {}, "certificates": {"x": 1}}, "certificates: unknown member 'x'"),
    ({"principals": {}, "certificates": []}, "certificates is no object"),
    ({"principals": {"a": {"allow": [], "keys": {"k": {}}}}}, "principals.a.keys.k.sha256 is not 64 hexadecimal"),
    ({"principals": {"a": {"allow": [], "keys": {"k": {"sha256": "0" * 64, "expires": "soon"}}}}}, "expected a day"),
    ({"principals": {n: {"allow": [], "keys": {"k": {"sha256": "0" * 64}}} for n in "ab"}}, "belongs to another key"),
    (rule(models=[]), "principals.a.allow[0].models is no list of patterns"),
    (rule(models="*"), "principals.a.allow[0].models is no list of patterns"),
    (rule(operations=["in fer"]), "principals.a.allow[0].operations: 'in fer' is no pattern"),
    (rule(methods=["*"]), "unknown member 'methods'"),
]


@pytest.mark.parametrize(("content", "text"), FILES, ids=range(len(FILES)))
def test_a_wrong_file_stops_the_start_with_the_place(path: Path, content: Any, text: str) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        access_of(path)
    assert caught.value.message.startswith(f"access file '{path}'")
    assert text in caught.value.message


def test_a_missing_or_blocking_file_stops_the_start(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        access_of(path)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        access_of(path)


def test_ten_thousand_principals_are_found_by_one_look_up(path: Path) -> None:
    keys_by_name = make(path, **{f"user{number}": TENANT for number in range(10_000)})
    found = KeyFile.read(path)
    assert len(found) == 10_000
    for name in ("user0", "user9999"):
        key = found.find(keys_by_name[name])
        assert isinstance(key, Key)
        assert key.principal.name == name


# ---------------------------------------------------------------------- the command


def test_keys_are_added_listed_checked_and_revoked(path: Path) -> None:
    added = keys(
        "add", str(path), "alice", "--models", "own*,b", "--operations", "inference", "--expires", "2999-01-01"
    )
    key = added.stdout.strip()
    assert (added.returncode, added.stderr) == (0, "")
    assert path.stat().st_mode & 0o777 == 0o600
    assert key.split("_", 2)[2] not in path.read_text()
    second = keys("add", str(path), "alice").stdout.strip()
    listed = keys("list", str(path)).stdout
    assert listed.count("inference on own*,b") == 2
    assert "2999-01-01" in listed
    assert keys("check", str(path)).stdout == f"'{path}' is valid: 2 keys\n"
    assert keys("check", str(path), "--key", "-", stdin=key).stdout == (
        "the key belongs to 'alice', who may: inference on own*,b\n"
    )
    assert keys("revoke", str(path), key.split("_")[1]).stdout == f"key '{key.split('_')[1]}' of 'alice' is revoked\n"
    refused = keys("check", str(path), "--key", key)
    assert (refused.returncode, refused.stderr) == (1, "headrace keys: the key is refused: it is not known\n")
    assert keys("check", str(path), "--key", second).returncode == 0


def test_a_changed_file_keeps_its_mode_and_its_link(tmp_path: Path, path: Path) -> None:
    real = tmp_path / "real.json"
    make(real, alice=ALL)
    real.chmod(0o640)
    path.symlink_to(real)
    assert keys("add", str(path), "bob").returncode == 0
    assert path.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert len(KeyFile.read(real)) == 2


def test_rules_are_added_and_removed(path: Path) -> None:
    key = keys("add", str(path), "alice", "--models", "a", "--operations", "infer").stdout.strip()
    added = keys("allow", str(path), "alice", "--models", "b*", "--operations", "load,unload")
    assert added.stdout == "'alice' may: infer on a; load,unload on b*\n"
    assert keys("allow", str(path), "alice", "--models", "b*", "--operations", "load,unload").stdout == added.stdout
    assert keys("allow", str(path), "labs", "--role", "--models", "lab*", "--operations", "infer").returncode == 0
    assert keys("add", str(path), "carol", "--roles", "labs").returncode == 0
    listed = keys("list", str(path)).stdout
    row = next(line for line in listed.splitlines() if "carol" in line)
    assert [each.strip() for each in row.split("|")[5:7]] == ["", "labs"]
    checked = keys("check", str(path), "--key", key, "--models", "a,b1", "--operations", "infer,load")
    assert checked.stdout.endswith("yes: infer on a\nno: load on a\nno: infer on b1\nyes: load on b1\n")
    assert keys("deny", str(path), "alice", "--models", "a", "--operations", "infer").stdout == (
        "'alice' may: load,unload on b*\n"
    )
    wrong = keys("deny", str(path), "alice", "--models", "zzz")
    assert "'alice' has no such rule; it may: load,unload on b*" in wrong.stderr
    assert keys("deny", str(path), "alice").stdout == "'alice' may: nothing\n"
    assert keys("deny", str(path), "labs", "--role").stdout == "the role 'labs' may: nothing\n"
    assert "'nobody' is not in" in keys("deny", str(path), "nobody").stderr


WRONG = [
    (["add", "{}"], "name the principal"),
    (["add", "{}", "a "], "principals.a  is no name"),
    (["add", "{}", "a", "--models", ""], "'' is no pattern"),
    (["add", "{}", "a", "--expires", "tomorrow"], "expected a day"),
    (["revoke", "{}", "nope"], "there is no key 'nope'"),
    (["list", "{}/missing"], "cannot be read"),
    (["add", "{}/missing/file", "a"], "No such file or directory"),
]


@pytest.mark.parametrize(("words", "text"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_command_changes_nothing(tmp_path: Path, words: list[str], text: str) -> None:
    path = tmp_path / "access.json"
    make(path, alice=ALL)
    before = path.read_bytes()
    where = str(tmp_path) if "/missing" in words[1] else str(path)
    ended = keys(*(word.replace("{}", where) for word in words))
    assert ended.returncode == 1
    assert text in ended.stderr
    assert path.read_bytes() == before


def test_commands_at_once_lose_no_key(path: Path) -> None:
    program = [sys.executable, "-m", "headrace_cli", "keys", "add", str(path)]
    started: list[subprocess.Popen[str]] = [
        subprocess.Popen([*program, f"user{number}"], stdout=subprocess.PIPE, text=True) for number in range(4)
    ]
    keys_by_name = [each.communicate(timeout=60)[0].strip() for each in started]
    found = KeyFile.read(path)
    assert all(isinstance(found.find(key), Key) for key in keys_by_name)


OPTIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: AccessOptions(open="metrics"), "--access-open needs --access-keys"),
    (lambda: AccessOptions(keys="x", open="in fer"), "--access-open: 'in fer' is no pattern"),
]


@pytest.mark.parametrize(("create", "text"), OPTIONS, ids=range(len(OPTIONS)))
def test_wrong_flags_are_refused(create: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        create()
