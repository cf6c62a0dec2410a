"""Tokens of issuers: signed by `cryptography`, sent to the interceptor, with key sets in files."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from headrace import ConfigError, Operation, PermissionDenied, Unauthenticated, Unavailable
from headrace_access import AccessControl, tokens, verification_limiter
from tests.interceptors.access.access_files import (
    ALL,
    EC,
    EC384,
    ED,
    ISSUER,
    OTHER_RSA,
    RSA,
    SECRET,
    TENANT,
    access_of,
    ask,
    b64,
    caller_with,
    extend,
    jwk,
    keys,
    make,
    sign,
    token,
    write_issuer,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An access file that trusts an issuer, with a rule for ``alice`` and one for the role ``scientists``."""
    path = tmp_path / "access.json"
    make(path, alice=TENANT)
    extend(path, roles={"scientists": [{"models": ["lab*"], "operations": ["infer"]}]})
    write_issuer(path, roles="groups")
    return path


ALGORITHMS = [(RSA, "RS256"), (RSA, "PS384"), (EC, "ES256"), (EC384, "ES384"), (ED, "EdDSA"), (SECRET, "HS256")]


@pytest.mark.parametrize(("key", "algorithm"), ALGORITHMS, ids=lambda each: each if isinstance(each, str) else "")
def test_a_token_names_the_principal(path: Path, key: Any, algorithm: str) -> None:
    write_issuer(path, jwk(key, kid="k1"), algorithms=[algorithm])
    access = access_of(path)
    for _ in range(2):  # the second one is cached
        assert ask(access, token(key, algorithm)).principal == "alice"
    other = token(key, algorithm)
    broken = other[:-6] + ("A" if other[-6] != "A" else "B") + other[-5:]
    for _ in range(2):
        with pytest.raises(Unauthenticated, match=r"^the token is refused: its signature is wrong$") as caught:
            ask(access, broken)
        assert caught.value.challenge == 'Bearer realm="headrace", error="invalid_token"'


GRANTED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"sub": "alice"}, "alice", ["own_1"]),
    ({"sub": "bob"}, "bob", []),
    ({"sub": "bob", "groups": ["scientists", "others", 5]}, "bob", ["lab_1"]),
    ({"sub": "alice", "groups": "openid scientists"}, "alice", ["own_1", "lab_1"]),
    ({"sub": "alice", "groups": {"scientists": 1}}, "alice", ["own_1"]),
]


@pytest.mark.parametrize(("claims", "name", "models"), GRANTED)
def test_roles_and_principals_of_the_file_give_the_rights_of_a_token(
    path: Path, claims: dict[str, Any], name: str, models: list[str]
) -> None:
    access, credential = access_of(path), token(**claims)
    for model in ("own_1", "lab_1", "other"):
        if model in models:
            assert ask(access, credential, model=model).principal == name
        else:
            with pytest.raises(PermissionDenied, match=f"^'{name}' may not do 'infer' on model '{model}'$"):
                ask(access, credential, model=model)


def test_claims_are_found_by_name_and_by_path(path: Path) -> None:
    write_issuer(path, principal="email", roles="realm_access.roles", prefix="corp:")
    access = access_of(path)
    credential = token(email="alice@example.com", email_verified=True, realm_access={"roles": ["scientists"]})
    assert ask(access, credential, model="lab_1").principal == "corp:alice@example.com"
    for verified in (False, "false", 1, None):
        with pytest.raises(Unauthenticated, match="its claim 'email' is not verified"):
            ask(access, token(email="alice@example.com", email_verified=verified))
    write_issuer(path, principal="https://example.com/user")
    assert ask(access_of(path), token(header=None, **{"https://example.com/user": "alice"})).principal == "alice"


# ---------------------------------------------------------------------- what is refused

PUBLIC = RSA.public_key()
PEM = PUBLIC.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
DER = PUBLIC.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
UNSIGNED = token(algorithm="none")
NOW = int(time.time())
THEIRS = jwk(OTHER_RSA, kid="k1")
WRONG: dict[str, tuple[Callable[[], str], str]] = {
    "of another key": (lambda: token(OTHER_RSA), "its signature is wrong"),
    "without a signature": (lambda: UNSIGNED, "its algorithm is not allowed"),
    "none, signed": (lambda: UNSIGNED + b64(b"x"), "its algorithm is not allowed"),
    "NONE": (lambda: token(algorithm="NoNe"), "its algorithm is not allowed"),
    "the public key as a secret": (lambda: token(PEM, "HS256"), "its algorithm is not allowed"),
    "the same in DER": (lambda: token(DER, "HS256"), "its algorithm is not allowed"),
    "the modulus as a secret": (lambda: token(jwk(RSA)["n"].encode(), "HS256"), "its algorithm is not allowed"),
    "HMAC, called RS256": (lambda: token(PEM, "RS256", signs="HS256"), "its signature is wrong"),
    "an algorithm that is not named": (lambda: token(RSA, "RS512"), "its algorithm is not allowed"),
    "an algorithm that is a list": (lambda: token(header={"alg": ["RS256"]}), "its algorithm is not allowed"),
    "no algorithm": (lambda: token(omit=["alg"]), "its algorithm is not allowed"),
    "a key id that is a path": (lambda: token(header={"kid": "../../../../dev/zero"}), "its key is not known"),
    "a key id that is an address": (lambda: token(header={"kid": "http://127.0.0.1:1/k"}), "its key is not known"),
    "a key id of SQL": (lambda: token(header={"kid": "' or 1=1 --"}), "its key is not known"),
    "a long key id": (lambda: token(header={"kid": "k" * 257}), "its header names no key"),
    "a key id of 1 MB": (lambda: token(header={"kid": "k" * 1_000_000}), "it is too long"),
    "a key id that is a number": (lambda: token(header={"kid": 1}), "its header names no key"),
    "its own key": (lambda: token(OTHER_RSA, header={"jwk": THEIRS}), "its signature is wrong"),
    "an address of its key": (lambda: token(OTHER_RSA, header={"jku": "http://[::1]:1"}), "its signature is wrong"),
    "a certificate": (lambda: token(OTHER_RSA, header={"x5u": "http://[::1]:1"}), "its signature is wrong"),
    "a certificate itself": (lambda: token(OTHER_RSA, header={"x5c": ["AA"]}), "its signature is wrong"),
    "critical": (lambda: token(header={"crit": ["exp"], "exp": 1}), "its header has critical fields"),
    "critical and none": (lambda: token(header={"crit": []}), "its header has critical fields"),
    "detached": (lambda: token(header={"b64": False, "crit": ["b64"]}), "its header has critical fields"),
    "expired": (lambda: token(exp=NOW - 31), "it has expired"),
    "for ever": (lambda: token(omit=["exp"]), "it has no claim 'exp'"),
    "not valid yet": (lambda: token(nbf=NOW + 3600), "it is not valid yet"),
    "issued in the future": (lambda: token(iat=NOW + 3600), "it is not valid yet"),
    "an end that is no number": (lambda: token(exp="soon"), "it is malformed"),
    "an end that is NaN": (lambda: token(exp=float("nan")), "it is malformed"),
    "an end without end": (lambda: token(exp=float("inf")), "it is malformed"),
    "for others": (lambda: token(aud="billing"), "it is for another audience"),
    "for others, several": (lambda: token(aud=["billing", "headrace2"]), "it is for another audience"),
    "for nobody": (lambda: token(omit=["aud"]), "it has no claim 'aud'"),
    "an audience that is an object": (lambda: token(aud={"headrace": 1}), "it is for another audience"),
    "of others": (lambda: token(iss="https://evil.example.com"), "its issuer is not known"),
    "of an almost equal issuer": (lambda: token(iss=f"{ISSUER}/"), "its issuer is not known"),
    "of a list of issuers": (lambda: token(iss=[ISSUER]), "its issuer is not known"),
    "of nobody": (lambda: token(omit=["iss"]), "its issuer is not known"),
    "without a name": (lambda: token(omit=["sub"]), "its claim 'sub' names no principal"),
    "with an empty name": (lambda: token(sub=""), "its claim 'sub' names no principal"),
    "with a name of two lines": (lambda: token(sub="alice\nlevel=ERROR"), "its claim 'sub' names no principal"),
    "with a name with NUL": (lambda: token(sub="alice\0"), "its claim 'sub' names no principal"),
    "with a long name": (lambda: token(sub="a" * 257), "its claim 'sub' names no principal"),
    "with a list of names": (lambda: token(sub=["alice"]), "it is malformed"),
    "three dots": (lambda: "...", "it is no token"),
    "two dots": (lambda: "..", "it is no token"),
    "encrypted": (lambda: "a.b.c.d.e", "it is no token"),
    "no base64": (lambda: "!.!.!", "it is no token"),
    "no JSON": (lambda: f"{b64(b'x')}.{b64(b'{}')}.", "it is no token"),
    "a list": (lambda: f"{b64(b'[]')}.{b64(b'{}')}.", "it is no token"),
    "nested": (lambda: f"{b64(b'[' * 5000)}.{b64(b'{}')}.", "it is no token"),
    "a number of 5,000 digits": (lambda: f"{b64(b'9' * 5000)}.{b64(b'{}')}.", "it is no token"),
    "with NUL": (lambda: token() + "\0", "it is malformed"),
    "with blanks": (lambda: token().replace(".", " .", 1), "it is no token"),
    "not ASCII": (lambda: "ключ.ключ.ключ", "it is no token"),
    "surrogates": (lambda: "\ud800.\ud800.\ud800", "it is no token"),
    "8,193 characters": (lambda: "x" * 8193, "it is too long"),
    "no key of the server": (lambda: "hr_4f2a91c0_x", "it is no key of this server"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_token_is_refused_without_repeating_it(path: Path, case: str) -> None:
    make_token, reason = WRONG[case]
    access, credential = access_of(path), make_token()
    for _ in range(2):
        with pytest.raises(Unauthenticated) as caught:
            ask(access, credential)
        what = "key" if reason in ("it is too long", "it is no key of this server") else "token"
        assert caught.value.message == f"the {what} is refused: {reason}"
    assert ask(access, token()).principal == "alice"


def test_without_a_key_id_the_only_key_of_the_algorithm_counts(path: Path) -> None:
    credential = token(omit=["kid"])
    assert ask(access_of(path), credential).principal == "alice"
    write_issuer(path, jwk(RSA, kid="k1"), jwk(OTHER_RSA, kid="k2"))
    with pytest.raises(Unauthenticated, match="its key is not known"):
        ask(access_of(path), credential)
    write_issuer(path, jwk(RSA), jwk(EC, kid="k2"), algorithms=["RS256", "ES256"])
    assert ask(access_of(path), credential).principal == "alice"


def test_a_key_is_for_its_own_algorithm(path: Path) -> None:
    """RFC 7517 section 4.4: a key with an ``alg`` verifies no other. A key for encryption verifies none."""
    write_issuer(path, jwk(RSA, kid="k1", alg="PS256"), algorithms=["RS256", "PS256"])
    with pytest.raises(Unauthenticated, match="its key is not known"):
        ask(access_of(path), token())
    assert ask(access_of(path), token(RSA, "PS256")).principal == "alice"
    write_issuer(path, jwk(RSA, kid="k1", use="enc"), jwk(RSA, kid="k2"))
    with pytest.raises(Unauthenticated, match="its key is not known"):
        ask(access_of(path), token())


# ---------------------------------------------------------------------- what is kept


def test_a_token_is_verified_once_until_it_expires(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified, decode, now_s = [], jwt.decode, time.time()

    def count(*arguments: Any, **others: Any) -> Any:
        verified.append(arguments[0])
        return decode(*arguments, **others)

    monkeypatch.setattr(jwt, "decode", count)
    access, right, wrong = access_of(path), token(exp=int(now_s) + 60), token(OTHER_RSA)
    for _ in range(3):
        ask(access, right)
        with pytest.raises(Unauthenticated):
            ask(access, wrong)
    assert verified == [right, wrong]
    for ahead, is_valid in ((59, True), (88, True), (91, False)):  # 60 s and 30 s of leeway
        monkeypatch.setattr(tokens, "time", lambda ahead=ahead: now_s + ahead)
        if is_valid:
            ask(access, right, Operation.MODEL_METADATA)
        else:
            with pytest.raises(Unauthenticated, match="it has expired"):
                ask(access, right, Operation.MODEL_METADATA)
    assert verified == [right, wrong]


def test_the_cache_of_tokens_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_MAX_KNOWN", 3)
    monkeypatch.setattr(tokens, "_MAX_WRONG", 3)
    access = access_of(path)
    assert access._watcher is not None
    for number in range(10):
        ask(access, token(jti=str(number)))
        with pytest.raises(Unauthenticated):
            ask(access, token(OTHER_RSA, jti=str(number)))
        assert 0 < len(access._watcher.tokens._known) <= 3
        assert 0 < len(access._watcher.tokens._wrong) <= 3


def test_a_flood_of_unknown_tokens_takes_a_fifth_of_the_time(path: Path) -> None:
    """Each verification takes 10 ms, and tokens arrive each ms."""
    now_ns = busy_ns = 0
    limiter, refused = verification_limiter.VerificationLimiter(lambda: now_ns, lambda: busy_ns), 0
    for _ in range(5000):
        try:
            begun_ns = limiter.begin()
        except Unavailable:
            refused += 1
            now_ns += 1_000_000
        else:
            now_ns, busy_ns = now_ns + 10_000_000, busy_ns + 10_000_000
            limiter.end(begun_ns)
    assert busy_ns == (5000 - refused) * 10_000_000
    assert 0.2 * now_ns <= busy_ns <= 0.2 * now_ns + 110_000_000  # 100 ms at once, and the last one
    access = access_of(path)
    known = token()
    ask(access, known)
    assert access._watcher is not None
    access._watcher.tokens._limiter._left_ns = -(10**12)
    with pytest.raises(Unavailable) as caught:
        ask(access, token(jti="1"))
    text = "too many unknown tokens arrive at once to verify them"
    assert (caught.value.retry_after_s, caught.value.message) == (1, text)
    ask(access, known)


def test_one_unknown_token_is_verified_in_each_turn_of_the_event_loop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification_limiter, "_MAX_WAITING", 12)
    verified: list[int] = []
    turn = 0
    verify = tokens.Tokens._verify

    def note(*arguments: Any) -> Any:
        verified.append(turn)
        return verify(*arguments)

    monkeypatch.setattr(tokens.Tokens, "_verify", note)
    wrong = [token(OTHER_RSA, jti=str(number)) for number in range(20)]

    async def main() -> None:
        nonlocal turn
        access, known, right = access_of(path), token(), token(jti="right")
        waiting: list[asyncio.Future[Any]] = []
        assert access.admit(caller_with(known), Operation.INFER, "own_1") is None
        for each in (wrong[0], right, right, wrong[0], *wrong[1:]):
            found = access.admit(caller_with(each), Operation.INFER, "own_1")
            waiting.append(asyncio.ensure_future(found))  # type: ignore[arg-type]
        assert access.admit(caller_with(known), Operation.INFER, "own_1") is None  # it is known
        assert len(verified) == 1
        turn += 1
        await asyncio.sleep(0)  # the first one has its turn, 12 wait, and the others are refused
        for number in (1, 5, 6):  # the first one would be next
            waiting[number].cancel()
        while not all(each.done() for each in waiting):
            turn += 1
            await asyncio.sleep(0)
            assert turn < 100
        kinds = [type(each.exception()) if not each.cancelled() else None for each in waiting]
        assert kinds[:7] == [Unauthenticated, None, type(None), Unauthenticated, Unauthenticated, None, None]
        assert kinds[7:] == [Unauthenticated] * 6 + [Unavailable] * 10
        # Once for each token that was not known by its turn.
        assert len(verified) == len(set(verified)) == 1 + 2 + 1 + 6
        turn += 1
        await asyncio.sleep(0)
        with pytest.raises(Unauthenticated):  # no other token waits, so at once
            access.admit(caller_with(wrong[-1]), Operation.INFER, "own_1")

    asyncio.run(main())


# ---------------------------------------------------------------------- the issuers of a file

SMALL = rsa.generate_private_key(65537, 1024)
SETTINGS: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
    ({"algorithms": ["RS256", "HS256"]}, [], "with a shared secret (HS...) or with a public key, not both"),
    ({"algorithms": ["none"]}, [], "algorithms: 'none' is none of RS256, "),
    ({"algorithms": []}, [], "algorithms is no list such as ['RS256']"),
    ({"algorithms": None}, [], "algorithms is no list such as ['RS256']"),
    ({"algorithms": ["HS256"]}, [], "it has no key for HS256"),
    ({"algorithms": ["HS256"]}, [{"kty": "oct", "k": b64(b"short")}], "the secret has less than 32 bytes"),
    ({"algorithms": ["HS256"], "keys": "https://a.b/"}, [], "the shared secret of 'HS256' comes from a file"),
    ({"algorithms": ["ES256"]}, [], "it has no key for ES256"),
    ({"algorithms": ["ES256"]}, [jwk(EC384, kid="k1")], "it has no key for ES256"),
    ({}, [jwk(SMALL, kid="k1")], "keys[0]: an RSA key has 2048 to 8192 bits"),
    ({}, [jwk(RSA, kid="k1") | {"d": "AQ"}], "keys[0] is a private key; give its public part only"),
    ({}, [jwk(RSA, kid="k1") | {"n": "!"}], "keys[0] is no key for RS256"),
    ({}, [jwk(RSA, kid=5)], "keys[0].kid is no text"),
    ({}, [jwk(RSA, kid=str(n)) for n in range(257)], "are no list of at most 256"),
    ({"keys": "missing.json"}, [], "missing.json' cannot be read: No such file"),
    ({"keys": "http://login.example.com/jwks"}, [], "has no TLS, so anyone between could replace the keys; use https"),
    ({"keys": "http://localhost.example.com/"}, [], "has no TLS"),
    ({"keys": "file:///etc/passwd"}, [], "'file:///etc/passwd' is no https address"),
    ({"keys": "https://u:p@login.example.com/"}, [], "an address with a password is not supported"),
    ({"keys": ""}, [], "keys is no address or file"),
    ({"audience": None}, [], "audience is no list such as ['headrace']"),
    ({"audience": [""]}, [], "audience is no list"),
    ({"leeway_s": 601}, [], "leeway_s is 601; expected 0 to 600 seconds"),
    ({"leeway_s": True}, [], "leeway_s is True"),
    ({"refresh_s": 1}, [], "refresh_s is 1; expected 10 to 86400"),
    ({"principal": 5}, [], "principal is no text"),
    ({"jwks": "x"}, [], "unknown member 'jwks'; known: keys, audience"),
]


@pytest.mark.parametrize(("settings", "jwks", "text"), SETTINGS, ids=range(len(SETTINGS)))
def test_a_wrong_issuer_stops_the_start_with_the_place(
    path: Path, settings: dict[str, Any], jwks: list[dict[str, Any]], text: str
) -> None:
    write_issuer(path, *jwks, **settings)
    with pytest.raises(ConfigError) as caught:
        access_of(path)
    assert caught.value.message.startswith(f"access file '{path}': issuers.{ISSUER}")
    assert text in caught.value.message
    assert "AQ" not in caught.value.message


def test_a_key_set_that_is_rubbish_is_refused(path: Path) -> None:
    for content in ("", "[]", '{"keys": {}}', "[" * 100_000, "x" * ((1 << 20) + 1)):
        path.with_name("jwks.json").write_text(content)
        with pytest.raises(ConfigError, match=r"jwks.json': it"):
            access_of(path)


@pytest.mark.parametrize("library", ["jwt", "cryptography"])
def test_a_missing_library_is_one_clear_line(path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError) as caught:
        access_of(path)
    assert caught.value.message == f"issuers.{ISSUER}: tokens need PyJWT: pip install 'headrace-access[jwt]'"


# ---------------------------------------------------------------------- the command


def test_check_prints_the_rights_of_a_token_or_its_refusal(path: Path) -> None:
    credential = token(groups=["scientists"], exp=4_000_000_000)
    ended = keys(
        "check", str(path), "--key", "-", "--models", "lab_1,other", "--operations", "infer,load", stdin=credential
    )
    assert ended.returncode == 1
    assert "the token belongs to 'alice', who may: inference,metadata on own*; infer on lab*\n" in ended.stdout
    assert ended.stdout.endswith("yes: infer on lab_1\nno: load on lab_1\nno: infer on other\nno: load on other\n")
    assert "2096-10-02T07:06:40+00:00" in ended.stdout
    ended = keys("check", str(path), "--key", token(aud="billing"))
    assert (ended.returncode, ended.stderr) == (
        1, "headrace keys: the token is refused: it is for another audience\n"
    )  # fmt: skip
    row = next(line for line in ended.stdout.splitlines() if "aud" in line)
    assert [each.strip() for each in row.split("|")[1:4]] == ["aud", "billing", "headrace"]
    assert keys("check", str(path), "--key", "x.y.z").stderr == "headrace keys: the token is refused: it is no token\n"
    for wrong in (token(exp=10**30), token(exp="x"), token(iss=5), token(sub={"a": 1})):
        assert keys("check", str(path), "--key", wrong).returncode in (0, 1)


def test_a_key_works_beside_tokens(path: Path) -> None:
    document = json.loads(path.read_text())
    key = make(path, admin=ALL)["admin"]
    extend(path, issuers=document["issuers"])
    access = access_of(path)
    assert ask(access, key, Operation.LOAD).principal == "admin"
    with pytest.raises(Unauthenticated, match=r"^the key is refused: it is not known$"):
        ask(access, key[:-1] + ("A" if key[-1] != "A" else "B"))
    with pytest.raises(Unauthenticated, match="this server needs a key or a token, in the header"):
        ask(access, None)


def test_a_signature_covers_the_sent_bytes(path: Path) -> None:
    """The parts of one token are no parts of another."""
    access = access_of(path)
    first, second = token().split("."), token(sub="bob", jti="2").split(".")
    for parts in ((first[0], second[1], first[2]), (first[0], first[1], second[2])):
        with pytest.raises(Unauthenticated, match="its signature is wrong"):
            ask(access, ".".join(parts))
    assert isinstance(access, AccessControl)
    with pytest.raises(Unauthenticated):
        ask(access, ".".join((*first[:2], b64(sign(first[0].encode(), "RS256", RSA)))))
