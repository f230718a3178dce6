"""The client's side of SCRAM-SHA-256, written from RFC 5802 alone: what the tests prove passwords with."""

from base64 import b64decode, b64encode
from hashlib import pbkdf2_hmac, sha256
from hmac import digest

MECHANISM = "SCRAM-SHA-256"


class ScramClient:
    def __init__(self, name: str, password: str, nonce: str = "fyko+d2lbbFgONRv9qkxdawL") -> None:
        self.nonce = nonce
        self._password = password
        self._bare = f"n={name.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
        self._said = b""
        self._salted = b""

    def first(self) -> bytes:
        return f"n,,{self._bare}".encode()

    def final(self, challenge: bytes, *, client_key: bytes | None = None) -> bytes:
        parts = dict(part.split("=", 1) for part in challenge.decode().split(","))
        assert parts["r"].startswith(self.nonce) and parts["r"] != self.nonce
        self._salted = pbkdf2_hmac("sha256", self._password.encode(), b64decode(parts["s"]), int(parts["i"]))
        key = client_key or digest(self._salted, b"Client Key", sha256)
        without_proof = f"c={b64encode(b'n,,').decode()},r={parts['r']}"
        self._said = f"{self._bare},{challenge.decode()},{without_proof}".encode()
        signature = digest(sha256(key).digest(), self._said, sha256)
        proof = bytes(one ^ other for one, other in zip(key, signature, strict=True))
        return f"{without_proof},p={b64encode(proof).decode()}".encode()

    def knows_server(self, answer: bytes) -> bool:
        server_key = digest(self._salted, b"Server Key", sha256)
        return answer == b"v=" + b64encode(digest(server_key, self._said, sha256))
