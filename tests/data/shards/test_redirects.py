"""Servers that redirect: to other schemes, to this machine, and to where they may."""

import http.server
import threading
from contextlib import contextmanager

import pytest

from diffvision.data.shards import redirects, remote
from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.redirects import is_public
from diffvision.data.shards.remote import Patience, read, stamp
from diffvision.data.shards.sources import Shard
from tests.data.conftest import fetch

QUICK = Patience(connect=1.0, read=1.0, tries=3, pause=0.01, total=5.0)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        target = self.server.target
        body = b"" if target else b"secret"
        self.send_response(302 if target else 200)
        if target:
            self.send_header("Location", target)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@contextmanager
def serving(address, target=None):
    """A server at an address of this machine, which redirects all requests to `target` where there is one."""
    server = http.server.ThreadingHTTPServer((address, 0), Handler)
    server.target, server.asked = target, []
    server.url = f"http://{address}:{server.server_port}/0.tar"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def _internet(monkeypatch):
    """127.0.0.2 and 127.0.0.3 stand for addresses of the internet, 127.0.0.1 stays what it is."""
    monkeypatch.setattr(redirects, "is_public", lambda address: address in ("127.0.0.2", "127.0.0.3"))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("127.0.0.1", False),
        ("::1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::7f00:1", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("fec0::1", False),
    ],
)
def test_addresses_of_the_internet(address, public):
    assert is_public(address) == public


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://x", "s3://bucket/0.tar"])
def test_other_schemes_are_refused_at_the_first_request(target, tmp_path):
    with serving("127.0.0.1", target) as server:
        with pytest.raises(OSError, match=f"redirects to '{target}': only http and"):
            fetch(ShardCache(tmp_path, patience=QUICK), Shard(server.url))
        assert server.asked == ["/0.tar"]


@pytest.mark.usefixtures("_internet")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "127.1"])
@pytest.mark.parametrize("ask", [read, stamp])
def test_a_public_server_cannot_send_us_to_this_machine(host, ask):
    with serving("127.0.0.1") as secret:
        read(secret.url, QUICK)  # the user may
        secret.asked.clear()
        with (
            serving("127.0.0.2", secret.url.replace("127.0.0.1", host)) as server,
            pytest.raises(OSError, match=r"its network|not a canonical"),
        ):
            ask(server.url, QUICK)
        assert secret.asked == []
        assert 1 <= len(server.asked) <= 2  # HEAD, then GET


@pytest.mark.usefixtures("_internet")
def test_a_chain_of_public_servers_does_not_end_at_this_machine():
    with serving("127.0.0.1") as secret, serving("127.0.0.3", secret.url) as second:
        with serving("127.0.0.2", second.url) as first, pytest.raises(OSError, match="not followed there"):
            read(first.url, QUICK)
        assert secret.asked == []


@pytest.mark.usefixtures("_internet")
@pytest.mark.parametrize(
    ("start", "end"), [("127.0.0.2", "127.0.0.3"), ("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")]
)
def test_other_redirects_are_followed(start, end):
    with serving(end) as last, serving(start, last.url) as first:
        assert read(first.url, QUICK) == b"secret"


@pytest.mark.usefixtures("_internet")
def test_a_relative_redirect_is_followed():
    with serving("127.0.0.2") as server:
        server.target = "/there/0.tar"
        with pytest.raises(OSError, match="TooManyRedirects"):  # for ever; it ends
            read(server.url, QUICK)
        assert set(server.asked) == {"/0.tar", "/there/0.tar"}


def test_from_https_to_http_is_refused():
    class Response:
        headers = {"Location": "http://example.org/0.tar"}  # noqa: RUF012

        def close(self):
            pass

    import asyncio

    from aiohttp import TraceRequestRedirectParams
    from yarl import URL

    params = TraceRequestRedirectParams("GET", URL("https://example.org/0.tar"), {}, Response())
    with pytest.raises(OSError, match="not to http from https"):
        asyncio.run(redirects._redirect(None, None, params))
    assert remote._settings("https", QUICK)["get_client"] is redirects.client
