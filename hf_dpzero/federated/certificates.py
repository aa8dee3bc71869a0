"""Certificates and keys that Flower's SuperLink and SuperNodes are started with.

TLS hides messages from the network, and the clients' keys keep strangers out; no guarantee rests on
either. The authority signs the server's certificate and its key is forgotten: another server, or a
certificate that ran out, takes another folder.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from hf_dpzero.federated import NAME
from hf_dpzero.ledger.log_file import write_for_owner

SERVER = ("ca.pem", "server.pem", "server.key")
"""What the server is started with; clients get the first."""

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )
except ImportError:
    raise ImportError("certificates need Flower: pip install 'hf-dpzero[federated]'.") from None


def make(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> list[Path]:
    """Writes the server's files and each client's NAME and NAME.pub, for their owner alone.

    Args:
      folder: that holds none of them.
      hosts: names and addresses by which clients reach the server.
      clients: names.
      days: the certificate holds.

    Raises:
      FileExistsError: a file is there; nothing is written.
      ValueError: a name that is none or comes twice, or no day.
    """
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


def check(folder: Path, host: str) -> str:
    """Returns until when a server's certificate holds.

    Args:
      folder: of `make`.
      host: by which clients reach the server.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: no certificate, one that ran out, or one of other hosts.
    """
    path, again = folder / SERVER[1], "make another with `hf-dpzero certificates`, in a new folder"
    if missing := [name for name in SERVER if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: {again}.")
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        raise ValueError(f"{path} is no certificate of a server: {again}.") from None
    until, hosts = found.not_valid_after_utc, [str(name.value) for name in names]
    if until < datetime.now(timezone.utc):
        raise ValueError(f"{path} ran out on {until:%Y-%m-%d}: {again}.")
    if host not in hosts:
        raise ValueError(f"{path} is of {', '.join(hosts)}, and {host} is none of them: {again}.")
    return f"{path}: {', '.join(hosts)}, until {until:%Y-%m-%d}"


def _server(hosts: Sequence[str], days: int) -> tuple[str, str, str]:
    """The texts of `SERVER`."""
    authority, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    names = x509.SubjectAlternativeName(list(map(_host, hosts)))
    root = _certificate(authority, "hf-dpzero", authority, days, x509.BasicConstraints(True, 0))
    own = _certificate(key, hosts[0], authority, days, x509.BasicConstraints(False, None), names)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    pem = (c.public_bytes(Encoding.PEM).decode() for c in (root, own))
    return next(pem), next(pem), secret.decode()


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    authority: ec.EllipticCurvePrivateKey,
    days: int,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    issuer, subject = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])
        for text in ("hf-dpzero", name)
    )
    now = datetime.now(timezone.utc)
    builder = x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number(),
        now - timedelta(hours=1),  # clocks differ
        now + timedelta(days=days),
    )  # fmt: skip
    for extension in extensions:
        builder = builder.add_extension(extension, isinstance(extension, x509.BasicConstraints))
    return builder.sign(authority, hashes.SHA256())


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _key_pair() -> tuple[str, str]:
    """A client's ECDSA key, and its public half, as SuperNodes read them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private.decode(), f"{public.decode()}\n"
