"""Certificates and keys: Flower's own readers take them, words for what does not hold."""

from __future__ import annotations

import ssl
import stat
import sys
from pathlib import Path

import pytest

from hf_dpzero.cli import main

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs CPython 3.11")


def made(folder: Path, *words: str) -> int:
    return main.main(["certificates", str(folder), "--host", "server.example", "10.0.0.7", *words])


def test_a_client_trusts_the_server_by_its_host_and_keys_are_kept(tmp_path, capsys):
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        load_ssh_private_key,
        load_ssh_public_key,
    )

    folder = tmp_path / "keys"
    assert made(folder, "--clients", "north", "south") == 0
    assert {path.name for path in folder.iterdir()} == {
        *("server.pem", "server.key", "north", "north.pub", "south", "south.pub")
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
    for host, trusted in (("server.example", True), ("10.0.0.7", True), ("other.example", False)):
        assert handshake(folder, host) is trusted
    private = [load_ssh_private_key((folder / n).read_bytes(), None) for n in ("north", "south")]
    public = load_ssh_public_key((folder / "north.pub").read_bytes())
    assert isinstance(private[0], ec.EllipticCurvePrivateKey) and private[0].key_size == 384
    assert private[0].public_key() == public != private[1].public_key()
    before = (folder / "server.key").read_text()
    assert made(folder, "--clients", "west") == 2 and "never overwritten" in capsys.readouterr().err
    assert (folder / "server.key").read_text() == before and not (folder / "west").exists()
    assert main.main(["certificates", str(folder), "--check"]) == 0
    assert "10.0.0.7, until 2" in capsys.readouterr().out


def handshake(folder: Path, host: str) -> bool:
    """Whether a client with the server's certificate alone accepts the server, in memory."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "server.pem"))
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname=host),
        server.wrap_bio(there, back, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
    return True


def test_what_does_not_hold_is_said_in_words(tmp_path, capsys, monkeypatch):
    from hf_dpzero.federated import certificates

    def said(*words: str) -> str:
        assert main.main(["certificates", str(tmp_path), *words]) == 2
        return capsys.readouterr().err

    assert "lacks server.pem, server.key" in said("--check")
    assert "--host is missing" in said("--clients", "a")
    assert "--clients a/b: give each a name" in said("--host", "a", "--clients", "a/b")
    assert "--clients n" in said("--host", "a", "--clients", "n", "n")
    assert "server.key" in said("--host", "a", "--clients", "server.key")
    assert "--days 0" in said("--host", "a", "--days", "0") and not list(tmp_path.iterdir())
    certificates.make(tmp_path, ["a"], [], days=1)
    own = (tmp_path / "server.key").read_bytes()
    certificates.make(tmp_path / "other", ["a"], [], days=1)
    for key in ((tmp_path / "other" / "server.key").read_bytes(), b"no key"):
        (tmp_path / "server.key").write_bytes(key)
        assert "server.key is not the key of server.pem" in said("--check")
    (tmp_path / "server.key").write_bytes(own)
    later = certificates.datetime.now(certificates.timezone.utc) + certificates.timedelta(days=2)
    monkeypatch.setattr(certificates, "datetime", type("Later", (), {"now": lambda zone: later}))
    assert "ran out on" in said("--check")
    (tmp_path / "server.pem").write_text("no certificate")
    assert "is no certificate of a server" in said("--check")
