"""What a request names by address: read under rules, and refused before a byte is read."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from omni_async.api.config import ApiConfig
from omni_async.api.media_source import MediaSource
from omni_async.errors import InvalidRequest

PUBLIC = "93.184.216.34"
CONFIG = ApiConfig(allowed_media_domains=("example.com",), max_upload_bytes=1000)


class Handler(BaseHTTPRequestHandler):
    """Answers by path: /ok, /large, /missing, /short, and /to?URL, which redirects."""

    def do_GET(self) -> None:
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path[4:])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        if self.path == "/short":
            self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"x" * (5000 if self.path == "/large" else 10))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Generator[int, None, None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


class Web:
    """Names and connections: every public address is the local server; it remembers whom it connected to."""

    def __init__(self, port: int, **names: str) -> None:
        self.port = port
        self.names = names
        self.connected: list[str] = []

    def resolve(self, host: str, port: int) -> list[str]:
        return [self.names.get(host.replace(".", "_"), PUBLIC)]

    def connect(self, address: str, port: int, timeout: float) -> socket.socket:
        self.connected.append(address)
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def source(self, config: ApiConfig = CONFIG) -> MediaSource:
        return MediaSource(config, resolve=self.resolve, connect=self.connect)


def refused(source: MediaSource, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        source.read(url)
    assert caught.value.param == "url"
    return caught.value.message


def test_an_allowed_domain_is_read_its_subdomains_too(port: int) -> None:
    web = Web(port)
    assert web.source().read("http://example.com/ok") == b"x" * 10
    assert web.source().read("http://cdn.example.com/ok?size=1") == b"x" * 10
    assert web.source().read("http://example.com/to?http://www.example.com/ok") == b"x" * 10
    assert web.source().read("http://example.com/to?/ok") == b"x" * 10


@pytest.mark.parametrize(
    "url",
    [
        "http://other.com/ok",
        "http://notexample.com/ok",
        "http://example.com.evil.net/ok",
        "http://example.com@evil.net/ok",
        "http://[::1]/ok",
        "http://127.0.0.1/ok",
        "http:///ok",
        "gopher://example.com/",
        "http://example.com:99999/ok",
        "http://me:secret@example.com/ok",
        "http://[example.com/ok",
    ],
)
def test_another_host_is_refused_before_anything_is_sent(port: int, url: str) -> None:
    web = Web(port)
    refused(web.source(), url)
    assert not web.connected


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.8",
        "192.168.1.1",
        "172.16.0.1",
        "169.254.169.254",
        "::1",
        "fe80::1",
        "fd00::1",
        "0.0.0.0",
        "100.64.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "ff0e::1",
        "fec0::1",
        "::ffff:127.0.0.1",
        "::127.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "fe80::1%eth0",
    ],
)
def test_an_allowed_name_that_leads_inside_is_refused(port: int, address: str) -> None:
    web = Web(port, example_com=address)
    assert "not public" in refused(web.source(), "http://example.com/ok")
    assert not web.connected


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"]
)
def test_public_addresses_are_read_also_those_that_stand_for_an_ipv4_address(port: int, address: str) -> None:
    web = Web(port, example_com=address)
    assert web.source().read("http://example.com/ok") == b"x" * 10
    assert web.connected == [address]


def test_one_inner_address_among_public_ones_is_enough_to_refuse(port: int) -> None:
    web = Web(port)
    source = MediaSource(CONFIG, resolve=lambda host, port: [PUBLIC, "10.0.0.1"], connect=web.connect)
    assert "not public" in refused(source, "http://example.com/ok")
    assert not web.connected


@pytest.mark.parametrize("host", ["a..example.com", "a" * 70 + ".example.com"])
def test_a_name_that_no_resolver_takes_is_the_callers_fault(host: str) -> None:
    assert "cannot be read" in refused(MediaSource(CONFIG), f"http://{host}/ok")


def test_an_address_with_other_letters_is_the_callers_fault(port: int) -> None:
    assert "cannot be read" in refused(Web(port).source(), "http://example.com/é")


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_drips_ends_with_the_time_it_is_given(head: bytes) -> None:
    gone = threading.Event()

    def drip() -> None:
        with listener, listener.accept()[0] as sock:
            sock.recv(1000)
            sock.sendall(head)
            # Each byte comes well within any time-out that starts anew with it.
            while not gone.wait(0.02):
                try:
                    sock.sendall(b"a")
                except OSError:
                    return

    listener = socket.create_server(("127.0.0.1", 0))
    web = Web(listener.getsockname()[1])
    source = MediaSource(CONFIG, seconds=0.3, resolve=web.resolve, connect=web.connect)
    server = threading.Thread(target=drip)
    server.start()
    try:
        assert "takes more than 0.3 s" in refused(source, "http://example.com/ok")
    finally:
        gone.set()
        server.join()


def test_each_redirect_is_checked_again(port: int) -> None:
    web = Web(port, inner_example_com="10.0.0.1")
    source = web.source()
    assert "domain" in refused(source, "http://example.com/to?http://other.com/ok")
    assert "not public" in refused(source, "http://example.com/to?http://inner.example.com/ok")
    assert "redirects" in refused(source, "http://example.com/to?file:///etc/passwd")
    assert web.connected == [PUBLIC] * 3
    loop = "/to?" * 6 + "/ok"
    assert "redirects too often" in refused(source, f"http://example.com{loop}")


def test_the_very_address_that_was_checked_is_connected_to(port: int) -> None:
    answers = [[PUBLIC], ["127.0.0.1"]]
    web = Web(port)
    source = MediaSource(CONFIG, resolve=lambda host, port: answers.pop(0), connect=web.connect)
    source.read("http://example.com/ok")
    assert web.connected == [PUBLIC]


def test_what_is_too_large_or_missing_is_refused(port: int) -> None:
    source = Web(port).source()
    assert "1000 bytes" in refused(source, "http://example.com/large")
    assert "404" in refused(source, "http://example.com/missing")
    assert "cut short" in refused(source, "http://example.com/short")


def test_a_host_that_does_not_answer_is_the_callers_fault() -> None:
    def fails(address: str, port: int, timeout: float) -> socket.socket:
        raise ConnectionRefusedError

    source = MediaSource(CONFIG, resolve=lambda host, port: [PUBLIC], connect=fails)
    assert "cannot be read" in refused(source, "http://example.com/ok")


def test_files_are_read_under_the_allowed_folder_only(tmp_path: Path) -> None:
    allowed = tmp_path / "media"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(b"fine")
    (tmp_path / "secret").write_bytes(b"secret")
    (allowed / "link").symlink_to(tmp_path / "secret")
    (allowed / "ring").symlink_to("ring")
    (allowed / "large").write_bytes(bytes(1001))
    source = MediaSource(ApiConfig(allowed_local_media_path=str(allowed), max_upload_bytes=1000))
    assert source.read(f"file://{allowed}/a%20b.png") == b"fine"
    outside = (f"{allowed}/../secret", f"{allowed}/link", "/etc/passwd")
    odd = (f"{allowed}/none", f"{allowed}/ring", f"{allowed}/a%00b", f"{allowed}/{'a' * 300}", f"{allowed}")
    for path in (*outside, *odd):
        assert "no file under" in refused(source, f"file://{path}")
    assert "1000 bytes" in refused(source, f"file://{allowed}/large")
    assert "does not read" in refused(source, f"file://elsewhere{allowed}/a%20b.png")
    assert "does not read" in refused(MediaSource(ApiConfig()), f"file://{allowed}/a%20b.png")


def test_data_addresses_carry_base64() -> None:
    source = MediaSource(ApiConfig())
    assert source.read("data:image/png;base64," + base64.b64encode(b"abc").decode()) == b"abc"
    for url in ("data:image/png,abc", "data:;base64,a b", "data:;base64,é", "data:"):
        refused(source, url)
