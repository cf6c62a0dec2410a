"""Access files, keys, tokens and key sets for the tests. Tokens are signed by `cryptography`, without PyJWT."""

from __future__ import annotations

import asyncio
import base64
import hmac
import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from headrace import Caller, Operation, ServerOptions
from headrace_access import AccessControl, AccessKeys, AccessOptions
from headrace_access.key_file import new_key

TENANT = [{"models": ["own*"], "operations": ["inference", "metadata"]}]
ALL = [{"models": ["*"], "operations": ["*"]}]
ISSUER = "https://login.example.com"


class Ended(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def keys(*words: str, stdin: str = "") -> Ended:
    """Run ``headrace keys`` in this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(stdin)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = AccessKeys().run(AccessKeys().parse(words))
    finally:
        sys.stdin = before
    return Ended(code, out.getvalue(), err.getvalue())


def make(path: Path, **rules: Any) -> dict[str, str]:
    """Write an access file. Return the key of each principal."""
    keys_by_name: dict[str, str] = {}
    principals: dict[str, Any] = {}
    taken: set[str] = set()
    for name, allow in rules.items():
        keys_by_name[name], key_id, digest = new_key(taken)
        taken.add(key_id)
        principals[name] = {"keys": {key_id: {"sha256": digest}}, "allow": allow}
    path.write_text(json.dumps({"principals": principals}))
    return keys_by_name


def extend(path: Path, **members: Any) -> None:
    """Add members to an access file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def access_of(path: Path, **options: Any) -> AccessControl:
    return AccessControl(ServerOptions(plugin_options=[AccessOptions(keys=str(path), **options)]))


def caller_with(credential: str | None, transport: str = "http", **others: Any) -> Caller:
    header = {"authorization": f"Bearer {credential}"} if credential is not None else {}
    return Caller(transport, header=header.get, headers=lambda: list(header.items()), **others)


def ask(
    access: AccessControl, credential: str | None, operation: Any = Operation.INFER, model: str = "own_1"
) -> Caller:
    """Ask for an operation, which is admitted or raises."""
    caller = caller_with(credential)

    async def admit() -> None:
        assert access.admit(caller, operation, model) is None

    asyncio.run(admit())
    return caller


# ---------------------------------------------------------------------- tokens

RSA = rsa.generate_private_key(65537, 2048)
OTHER_RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
EC384 = ec.generate_private_key(ec.SECP384R1())
ED = ed25519.Ed25519PrivateKey.generate()
SECRET = b"0123456789abcdef0123456789abcdef"
_HASHES: dict[str, Any] = {"256": hashes.SHA256(), "384": hashes.SHA384(), "512": hashes.SHA512()}


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def number(value: int, size: int | None = None) -> str:
    return b64(value.to_bytes(size or (value.bit_length() + 7) // 8, "big"))


def jwk(key: Any, **members: Any) -> dict[str, Any]:
    """Return the public part of ``key``, or a secret, as a JWK."""
    if isinstance(key, bytes):
        return {"kty": "oct", "k": b64(key), **members}
    if isinstance(key, rsa.RSAPrivateKey):
        public = key.public_key().public_numbers()
        return {"kty": "RSA", "n": number(public.n), "e": number(public.e), **members}
    if isinstance(key, ec.EllipticCurvePrivateKey):
        point, size = key.public_key().public_numbers(), key.key_size // 8
        return {
            "kty": "EC",
            "crv": f"P-{key.key_size}",
            "x": number(point.x, size),
            "y": number(point.y, size),
            **members,
        }
    return {"kty": "OKP", "crv": "Ed25519", "x": b64(key.public_key().public_bytes_raw()), **members}


def sign(data: bytes, algorithm: str, key: Any) -> bytes:
    digest: Any = _HASHES.get(algorithm[2:])
    if algorithm.startswith("HS"):
        return hmac.digest(key, data, f"sha{algorithm[2:]}")
    if algorithm.startswith("RS"):
        return bytes(key.sign(data, padding.PKCS1v15(), digest))
    if algorithm.startswith("PS"):
        return bytes(key.sign(data, padding.PSS(padding.MGF1(digest), digest.digest_size), digest))
    if algorithm.startswith("ES"):
        size = key.key_size // 8
        return b"".join(each.to_bytes(size, "big") for each in decode_dss_signature(key.sign(data, ec.ECDSA(digest))))
    if algorithm == "EdDSA":
        return bytes(key.sign(data))
    return b""


def token(
    key: Any = RSA,
    algorithm: str = "RS256",
    header: Mapping[str, Any] | None = None,
    omit: Sequence[str] = (),
    signs: str = "",
    **claims: Any,
) -> str:
    """Return a token with ``claims`` and ``header`` in place of valid ones. ``signs`` is its real algorithm."""
    head = {"alg": algorithm, "typ": "JWT", "kid": "k1", **(header or {})}
    body = {"iss": ISSUER, "aud": "headrace", "sub": "alice", "exp": int(time.time()) + 60, **claims}
    signed = ".".join(
        b64(json.dumps({name: value for name, value in each.items() if name not in omit}).encode())
        for each in (head, body)
    )
    return f"{signed}.{b64(sign(signed.encode(), signs or algorithm, key))}"


def write_issuer(path: Path, *jwks: dict[str, Any], name: str = ISSUER, **settings: Any) -> None:
    """Add an issuer to an access file, with ``jwks`` in a file beside it."""
    path.with_name("jwks.json").write_text(json.dumps({"keys": jwks or [jwk(RSA, kid="k1")]}))
    issuer = {"keys": "jwks.json", "audience": "headrace", "algorithms": ["RS256"], **settings}
    extend(path, issuers={name: issuer})
