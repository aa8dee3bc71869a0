"""Certificates and keys that Flower's SuperLink and SuperNodes are started with.

TLS hides messages from the network, and the clients' keys keep strangers out; no guarantee rests on
either. The server's certificate signs itself: clients get it as the one that they trust.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from hf_dpzero.federated import NAME
from hf_dpzero.ledger.log_file import write_for_owner

SERVER = ("server.pem", "server.key")
"""What the server is started with; clients get the first."""

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
except ImportError:
    raise ImportError("certificates need cryptography: pip install cryptography.") from None

_PEM = serialization.Encoding.PEM


def make(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> list[Path]:
    """Writes the server's files and each client's NAME and NAME.pub, for their owner alone.

    Args:
      hosts: names and addresses by which clients reach the server.
      clients: their names.
      days: how long the certificate holds.
    """
    if not hosts:
        raise ValueError("--host is missing: name the server as its clients reach it.")
    if days < 1:
        raise ValueError(f"--days {days}: a certificate holds for a day or more.")
    names = [*SERVER, *(name for client in clients for name in (client, f"{client}.pub"))]
    wrong = [n for n in clients if not NAME.fullmatch(n)] + [n for n in names if names.count(n) > 1]
    if wrong:
        raise ValueError(
            f"--clients {wrong[0]}: give each a name of its own, of letters, digits, '.', '_' and '-'."
        )
    if there := [name for name in names if (folder / name).exists()]:
        raise FileExistsError(
            f"{folder} holds {', '.join(there)}: keys are never overwritten, for whoever was let in by "
            "them would be shut out. Take another folder, or remove these."
        )
    texts = [*_server(hosts, days), *(text for _ in clients for text in _key_pair())]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, texts, strict=True):
        write_for_owner(folder / name, text)
    return [folder / name for name in names]


def check(folder: Path) -> str:
    """Returns of which hosts a folder's certificate is, and until when.

    Refuses one that ran out, and a key of another certificate.
    """
    path, again = folder / SERVER[0], "make another with `hf-dpzero certificates`, in a new folder"
    if missing := [name for name in SERVER if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: {again}.")
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        raise ValueError(f"{path} is no certificate of a server: {again}.") from None
    try:
        key = serialization.load_pem_private_key((folder / SERVER[1]).read_bytes(), None)
        paired = key.public_key() == found.public_key()
    except (ValueError, TypeError):  # no key at all; one that a password locks
        paired = False
    if not paired:
        raise ValueError(f"{folder}: {SERVER[1]} is not the key of {SERVER[0]}: {again}.")
    until, hosts = found.not_valid_after_utc, [str(name.value) for name in names]
    if until < datetime.now(timezone.utc):
        raise ValueError(f"{path} ran out on {until:%Y-%m-%d}: {again}.")
    return f"{path}: {', '.join(hosts)}, until {until:%Y-%m-%d}"


def _server(hosts: Sequence[str], days: int) -> tuple[str, str]:
    """The texts of `SERVER`."""
    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, hosts[0][:64])])
    made = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(),
            now - timedelta(hours=1),  # clocks differ
            now + timedelta(days=days),
        )
        .add_extension(x509.SubjectAlternativeName(list(map(_host, hosts))), critical=False)
        .add_extension(x509.BasicConstraints(True, 0), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    return made.public_bytes(_PEM).decode(), _secret(key, serialization.PrivateFormat.PKCS8)


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _key_pair() -> tuple[str, str]:
    """A client's ECDSA key, and its public half, as SuperNodes read them."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public = key.public_key().public_bytes(*ssh).decode()
    return _secret(key, serialization.PrivateFormat.OpenSSH), f"{public}\n"


def _secret(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> str:
    return key.private_bytes(_PEM, form, serialization.NoEncryption()).decode()
