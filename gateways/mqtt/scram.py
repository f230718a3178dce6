"""The server's side of one SCRAM-SHA-256 exchange (RFC 5802, RFC 7677). Machine: no I/O; the nonce is handed in.

    client   n,,n=user,r=<client's nonce>                           -> `begin`: who it says it is
    server   r=<both nonces>,s=<salt>,i=<iterations>                <- `challenge`
    client   c=biws,r=<both nonces>,p=<proof>                       -> `finish`: whether it knows the password
    server   v=<signature>                                          <- so that the client knows that we know it too

Channel binding is not offered: a client that says `n` or `y` is welcome, one that insists (`p=`) is not. A name to act
for must be the client's own. Neighbours: controller/verifiers.py has what is kept, login.py carries the messages in
AUTH packets, delivery/login.py counts failures.
"""

from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from hashlib import sha256
from hmac import compare_digest, digest

from headrace.controller.verifiers import Verifier

MESSAGE_BYTES_MAX = 8_192


class ScramError(ValueError):
    """The client's message is not what SCRAM asks for here."""


class Exchange:
    def __init__(self, nonce: str) -> None:
        """`nonce`: unguessable printable text without a comma."""
        self._nonce = nonce
        self._header = ""
        self._client_first = ""
        self._server_first = ""
        self._verifier: Verifier | None = None

    def begin(self, message: bytes) -> str:
        """The name of the user that the client wants to be."""
        text = _text(message)
        binding, _, rest = text.partition(",")
        acting_for, comma, bare = rest.partition(",")
        if binding.startswith("p="):
            raise ScramError("channel binding is not offered")
        if binding not in ("n", "y") or not comma:
            raise ScramError("the message does not begin with a GS2 header")
        if bare.startswith("m="):
            raise ScramError("an extension that must be understood is not")
        name, nonce = _fields(bare, "n", "r")
        name = _name(name)
        if acting_for and (not acting_for.startswith("a=") or _name(acting_for[2:]) != name):
            raise ScramError("nobody acts for another user here")
        self._header = text[: len(text) - len(bare)]
        self._client_first = bare
        self._nonce = nonce + self._nonce
        return name

    def challenge(self, verifier: Verifier) -> bytes:
        self._verifier = verifier
        salt = b64encode(verifier.salt).decode()
        self._server_first = f"r={self._nonce},s={salt},i={verifier.iterations}"
        return self._server_first.encode()

    def finish(self, message: bytes) -> bytes | None:
        """Our last word to a client that has proven the password; None to one that has not."""
        verifier = self._verifier
        assert verifier is not None, "begin, challenge, finish"
        text = _text(message)
        without_proof, found, proof_text = text.rpartition(",p=")
        if not found:
            raise ScramError("the message does not end with a proof")
        binding, nonce = _fields(without_proof, "c", "r")
        if _decoded(binding) != self._header.encode():
            raise ScramError("the GS2 header is not the one that the client began with")
        if not compare_digest(nonce.encode(), self._nonce.encode()):
            raise ScramError("the nonce is not the one of this exchange")
        proof = _decoded(proof_text)
        if len(proof) != len(verifier.stored_key):
            raise ScramError("the proof has another length")
        said = f"{self._client_first},{self._server_first},{without_proof}".encode()
        signature = digest(verifier.stored_key, said, sha256)
        client_key = bytes(one ^ other for one, other in zip(proof, signature, strict=True))
        if not compare_digest(sha256(client_key).digest(), verifier.stored_key):
            return None
        return b"v=" + b64encode(digest(verifier.server_key, said, sha256))


def _text(message: bytes) -> str:
    if len(message) > MESSAGE_BYTES_MAX:
        raise ScramError("the message is too long")
    try:
        return message.decode()
    except UnicodeDecodeError:
        raise ScramError("the message is not UTF-8") from None


def _fields(text: str, first: str, second: str) -> tuple[str, str]:
    """The values of the two attributes that must stand in front; more may follow, and mean nothing to us."""
    one, _, rest = text.partition(",")
    two = rest.partition(",")[0]
    if not one.startswith(f"{first}=") or not two.startswith(f"{second}="):
        raise ScramError(f"the message does not have {first}= and {second}= where they belong")
    if not (one[2:] and two[2:]):
        raise ScramError(f"{first}= or {second}= is empty")
    return one[2:], two[2:]


def _name(text: str) -> str:
    """A comma is written =2C and = is written =3D; no other = may stand in a name."""
    parts = text.split("=")
    if any(part[:2] not in ("2C", "3D") for part in parts[1:]):
        raise ScramError("a name holds an = that stands for nothing")
    return parts[0] + "".join({"2C": ",", "3D": "="}[part[:2]] + part[2:] for part in parts[1:])


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (NotBase64, ValueError):
        raise ScramError("not base64") from None
