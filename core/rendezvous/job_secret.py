"""The secret of a job, and sockets that listen at one address alone.

By the secret launchers, ranks and servers of weights prove to each other that they belong to the job.

The secret is the value of an environment variable, which schedulers pass on to all nodes of a job (``sbatch`` and
``srun`` do, Kubernetes from a Secret), or the text of a file that only its owner can read, which another variable
names. It is never sent: each side signs what the other one has chosen at random (HMAC of RFC 2104, with SHA-256).
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from ..base.errors import ConfigError
from ..base.files import brief, read_file

SECRET, SECRET_FILE = "SHARDSTACK_JOB_SECRET", "SHARDSTACK_JOB_SECRET_FILE"
"""Environment variables: the secret, or the file that has it."""

_LEAST_BYTES, _MOST_BYTES = 16, 4096
_HOW = f"make one with: (umask 077; openssl rand -hex 32 > job.secret); export {SECRET_FILE}=job.secret on every node"


def job_secret(host: str = "localhost") -> bytes:
    """Returns the secret of the job, or nothing where there is none and `host` is this machine alone.

    Args:
        host: the address at which the parts of the job meet.

    Raises:
        ConfigError: there is no secret, and other machines reach `host`; or the secret is too short, or in a file that
            others may read.
    """
    path = os.environ.get(SECRET_FILE)
    secret = _of_file(Path(path)) if path else os.environ.get(SECRET, "").encode().strip()
    if not secret and not path:
        if not is_loopback(host):
            raise ConfigError(f"other machines reach {host}, and the job has no secret to know its own by; {_HOW}")
        return b""
    if len(secret) < _LEAST_BYTES:
        where = f"the file of {SECRET_FILE}" if path else SECRET
        raise ConfigError(f"{where} has {len(secret)} characters; a secret takes {_LEAST_BYTES} or more; {_HOW}")
    return secret


def _of_file(path: Path) -> bytes:
    try:
        state, secret = path.stat(), read_file(path, _MOST_BYTES).strip()
    except (OSError, ValueError) as error:  # BoundsError, and a path that is none
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{SECRET_FILE} is {brief(str(path))}: {reason}; {_HOW}") from None
    if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{SECRET_FILE} is {path}, which others may read; run: chmod 600 {path}")
    if state.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{SECRET_FILE} is {path}, which belongs to another user; {_HOW}")
    return secret


def signature(secret: bytes, *parts: str | bytes) -> str:
    """Returns the HMAC of the parts, in this order and with these borders, by the job's secret."""
    signed = hmac.new(secret, digestmod="sha256")
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        signed.update(len(data).to_bytes(8, "little") + data)
    return signed.hexdigest()


def is_signed(given: object, secret: bytes, *parts: str | bytes) -> bool:
    """Returns whether what came is the signature of the parts, in a time that does not depend on where it differs."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), signature(secret, *parts).encode())


def is_loopback(host: str) -> bool:
    """Returns whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(address: tuple[str, int], names: Sequence[str] = ("the address", "the port")) -> socket.socket:
    """Returns a socket that listens at an address, on no other interface.

    Args:
        names: what a message calls the host and the port, as the flags that set them.

    Raises:
        ConfigError: it is not an address of this machine, or the port is taken.
    """
    host, port = address
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(place[:2], family=family)
    except (OSError, OverflowError) as error:
        is_elsewhere = isinstance(error, socket.gaierror) or getattr(error, "errno", 0) == errno.EADDRNOTAVAIL
        found, to_do = (
            (f"{names[0]} {host}", "give one of this machine's")
            if is_elsewhere
            else (f"{names[1]} {port}", "choose another one")
        )
        raise ConfigError(f"{found} cannot be used ({error}); {to_do}") from None
