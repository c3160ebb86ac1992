"""The socket that the server listens on, at an address or a path, and the options for HTTPS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from forkpoint.checks import host_in_url
from forkpoint.errors import ConfigError
from forkpoint.server.config import ServerConfig

BACKLOG = 2048  # connections that the system accepts ahead of the server; uvicorn's default


@contextmanager
def listen(config: ServerConfig) -> Iterator[socket.socket]:
    """Open the listening socket, non-blocking. On leaving the context it is closed and its path removed.

    Raises ConfigError naming the address or the path, and what is wrong with it.
    """
    with _at_path(config.uds) if config.uds is not None else _at_address(config) as listener:
        listener.setblocking(False)
        yield listener


def url(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL that clients connect to: the listener's with the root path, or unix:PATH."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http"
    if config.ssl_certfile is not None:
        scheme = "https"
    return f"{scheme}://{host_in_url(host)}:{port}{config.root_path}"


def _at_address(config: ServerConfig) -> socket.socket:
    where = f"{config.host}:{config.port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise ConfigError(f"cannot listen on {where}: {reason}; give another --port or --host") from error


@contextmanager
def _at_path(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale(path)
            listener.bind(path)
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; give another --uds") from error
        own = os.stat(path).st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == own:  # else another server has taken the path
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody listens on any more. Raises ConfigError for anything else at the path."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on {path}: there is a file that is not a socket; give another --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(f"cannot listen on {path}: another server listens there; give another --uds")


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the context of TLS handshakes, or None without a certificate.

    Raises ConfigError for files that cannot be read, do not belong together, or need a password.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key = config.ssl_keyfile or config.ssl_certfile
    given = f"ssl_certfile={config.ssl_certfile!r}, ssl_keyfile={key!r}"
    try:
        # The empty password keeps OpenSSL from asking for one at the terminal.
        context.load_cert_chain(config.ssl_certfile, key, password="")
        if config.ssl_ca_certs is not None:
            given = f"ssl_ca_certs={config.ssl_ca_certs!r}"
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # ssl.SSLError is an OSError
        reason = error.strerror
        if isinstance(error, ssl.SSLError):
            reason = error.reason or str(error)
        raise ConfigError(
            f"{given}: {reason}; give PEM files of a certificate and its key without a password"
        ) from error
    requirement = config.ssl_cert_reqs
    if requirement is None:
        requirement = ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED
    context.verify_mode = ssl.VerifyMode(requirement)
    return context
