"""Media that a request names by address instead of sending it: what may be read, and reading it.

`data:` always; `http(s)://` from the allowed domains only, and never from an address inside this network,
redirects included; `file://` only under the allowed folder. Blocks; runs in the media threads.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from omni_async.api.allowed_path import existing_under
from omni_async.api.config import ApiConfig
from omni_async.errors import InvalidRequest

MAX_REDIRECTS = 3
SECONDS = 10.0
PIECE = 64 * 1024
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Resolve = Callable[[str, int], list[str]]
Connect = Callable[[str, int, float], socket.socket]


def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def connect_to(address: str, port: int, timeout: float) -> socket.socket:
    """A TCP connection."""
    return socket.create_connection((address, port), timeout)


def is_public(address: str) -> bool:
    """Whether `address` is one host of the internet, also where it stands for an IPv4 address."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else ip.ipv4_mapped or ip.sixtofour
        if inner is None and ip.is_site_local:
            return False
        ip = inner or ip
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


@contextmanager
def ended_at(deadline: float, sock: socket.socket) -> Generator[None, None, None]:
    """Cuts `sock` off at the deadline: a socket's own time-out starts anew with every byte that comes."""
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, (sock,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _cut(sock: socket.socket) -> None:
    # Both sides may have closed it by now. An SSLSocket's own method would change it under its reader.
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class MediaSource:
    """Reads what a URL names, under the server's rules. `param` is the field that errors name.

    A web address has `seconds`, redirects included; only the look-up of its name is not cut off by them.
    """

    def __init__(
        self,
        config: ApiConfig,
        *,
        param: str = "url",
        seconds: float = SECONDS,
        resolve: Resolve = resolve_host,
        connect: Connect = connect_to,
    ) -> None:
        self._domains = [domain.lower() for domain in config.allowed_media_domains]
        self._folder = config.allowed_local_media_path
        self._limit = config.max_upload_bytes
        self._param = param
        self._seconds = seconds
        self._resolve = resolve
        self._connect = connect

    def read(self, url: str) -> bytes:
        """The bytes. Raises `InvalidRequest`."""
        parts = self._split(url)
        if parts.scheme == "data":
            return self._read_data(url)
        if parts.scheme == "file":
            return self._read_file(parts)
        if parts.scheme in ("http", "https"):
            return self._read_http(parts)
        raise self._refusal("must be a data:, http(s):// or file:// address")

    def _split(self, url: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:
            raise self._refusal("is no valid address") from None
        return parts

    def _refusal(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"{self._param} {why}.", param=self._param)

    def _read_data(self, url: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise self._refusal("must be data:TYPE;base64,…")
        try:
            return base64.b64decode(body, validate=True)
        except ValueError:
            raise self._refusal("is no valid base64") from None

    def _read_file(self, parts: SplitResult) -> bytes:
        if not self._folder or parts.netloc not in ("", "localhost"):
            raise self._refusal("names a file, which this server does not read (--allowed-local-media-path)")
        path = existing_under(self._folder, unquote(parts.path))
        if path is None or not path.is_file():
            raise self._refusal("names no file under the allowed folder")
        try:
            with path.open("rb") as file:
                data = file.read(self._limit + 1)
        except OSError as error:
            raise self._refusal(f"cannot be read: {type(error).__name__}") from None
        if len(data) > self._limit:
            raise self._refusal(f"names a file of more than {self._limit} bytes")
        return data

    def _read_http(self, parts: SplitResult) -> bytes:
        deadline = time.monotonic() + self._seconds
        for _ in range(MAX_REDIRECTS + 1):
            with self._ask(parts, deadline) as answer:
                if answer.status not in REDIRECTS:
                    return self._body(answer, deadline)
                parts = self._split(urljoin(parts.geturl(), answer.headers.get("location", "")))
            if parts.scheme not in ("http", "https"):
                break
        raise self._refusal("redirects too often, or to what is no web address")

    @contextmanager
    def _ask(self, parts: SplitResult, deadline: float) -> Generator[http.client.HTTPResponse, None, None]:
        """The head of the answer of one address, checked before a byte is sent."""
        if parts.username is not None:
            raise self._refusal("must carry no user name")
        host = (parts.hostname or "").lower()
        if not any(host == domain or host.endswith(f".{domain}") for domain in self._domains):
            raise self._refusal("is not on a domain that this server reads (--allowed-media-domain)")
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        connection = http.client.HTTPConnection(host, port)
        try:
            connection.sock = sock = self._open(host, port, secure, deadline)
            with ended_at(deadline, sock):
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                headers = {"Host": parts.netloc, "Accept": "image/*, audio/*", "Connection": "close"}
                connection.request("GET", path, headers=headers)
                with connection.getresponse() as answer:
                    yield answer
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._refuse_late(deadline)
            raise self._refusal(f"cannot be read: {type(error).__name__}") from None
        finally:
            connection.close()

    def _open(self, host: str, port: int, secure: bool, deadline: float) -> socket.socket:
        """A connection to the very address that was found to be public."""
        addresses = self._resolve(host, port)
        if not addresses or not all(is_public(each) for each in addresses):
            raise self._refusal("leads to an address that is not public")
        sock = self._connect(addresses[0], port, max(0.1, deadline - time.monotonic()))
        if not secure:
            return sock
        context = ssl.create_default_context()
        return context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)

    def _body(self, answer: http.client.HTTPResponse, deadline: float) -> bytes:
        if answer.status != 200:
            raise self._refusal(f"was answered with status {answer.status}")
        pieces: list[bytes] = []
        size = 0
        while piece := answer.read(PIECE):
            size += len(piece)
            if size > self._limit:
                raise self._refusal(f"has more than {self._limit} bytes")
            pieces.append(piece)
        self._refuse_late(deadline)
        if answer.length:
            raise self._refusal("was cut short")
        return b"".join(pieces)

    def _refuse_late(self, deadline: float) -> None:
        """What was cut off at the deadline looks like an end, or like a fault of the line."""
        if time.monotonic() >= deadline:
            raise self._refusal(f"takes more than {self._seconds:g} s")
