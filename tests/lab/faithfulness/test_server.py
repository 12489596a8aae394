"""Replies of a server on the loopback: retried, refused, kept, and never with a key where it does not belong."""

import base64
import html
import json
import os
import socket
import threading
import traceback
import urllib.parse
from contextlib import suppress

import pytest

from diffvision.data.shards.remote import Patience
from diffvision.lab.faithfulness.server import ChatServer, NoReply

QUICK = Patience(read=5, tries=3, pause=0.01)


def test_a_request_is_a_chat_at_temperature_zero(judging):
    server = judging(lambda prompt: f"so {prompt}")
    assert ChatServer(f"{server.url}/", "m", "secret", QUICK).reply("hé", "row 1") == "so hé"
    (asked,) = server.asked
    assert (asked["path"], asked["model"], asked["temperature"]) == ("/v1/chat/completions", "m", 0)
    assert server.keys == ["Bearer secret"]
    assert "secret" not in repr(ChatServer(server.url, "m", "secret"))


@pytest.mark.parametrize(
    "failure",
    [(500, "oops"), (429, "slow down"), (200, "<html>Welcome</html>"), (200, "{}"),
     (200, '{"choices": [{"message": {"content": null}}]}')],
)  # fmt: skip
def test_failures_that_pass_are_asked_again(judging, failure):
    answers = iter([failure, failure, "yes"])
    server = judging(lambda prompt: next(answers))
    assert ChatServer(server.url, "m", None, QUICK).reply("?", "row 1") == "yes"
    assert len(server.asked) == 3
    assert server.keys == [None] * 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (503, "<html><h1>Down</h1></html>"),
            r"did not answer about row 'a' in 3 tries \(HTTP 503: '<html>.*start",
        ),
        ((200, "<html>Log in</html>"), r"in 3 tries \(no answer of a chat, but '<html>Log in</html>'\)"),
    ],
)
def test_failures_that_last_are_named(judging, answer, message):
    server = judging(lambda prompt: answer)
    with pytest.raises(NoReply, match=message):
        ChatServer(server.url, "m", None, QUICK).reply("?", "row 'a'")
    assert len(server.asked) == 3


@pytest.mark.parametrize("answer", [(401, '{"error": "no key"}'), (404, "no such model"), (302, "http://127.0.0.1:9/")])
def test_refusals_are_not_asked_again(judging, answer):
    server = judging(lambda prompt: answer)
    with pytest.raises(NoReply, match=rf"refuses row 'a' \(HTTP {answer[0]}: .*see"):
        ChatServer(server.url, "m", "secret", QUICK).reply("?", "row 'a'")
    assert len(server.asked) == 1


def test_a_server_that_hangs_or_is_not_there(judging):
    wait = threading.Event()
    server = judging(lambda prompt: wait.wait(20) or "late")
    impatient = Patience(read=0.05, tries=2, pause=0.01)
    with pytest.raises(NoReply, match=r"in 2 tries \(no whole reply within"):
        ChatServer(server.url, "m", None, impatient).reply("?", "row 'a'")
    wait.set()
    with pytest.raises(NoReply, match=r"in 2 tries .*connect"):
        ChatServer("http://127.0.0.1:9/v1", "m", None, impatient).reply("?", "row 'a'")
    with pytest.raises(ValueError, match=r"judge\.url is 'file:///etc'"):
        ChatServer("file:///etc", "m")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HELLO\r\n\r\n", "no whole answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFF\r\nab", "no whole answer"),
        (b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nFF\r\nab", "no whole answer"),
    ],
)
def test_answers_that_break_off_are_asked_again(answer, message):
    def serve(listener):
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # closing with unread bytes would reset the connection
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with pytest.raises(NoReply, match=rf"about row 'a' in 2 tries \({message}"):
            ChatServer(url, "m", None, Patience(read=5, tries=2, pause=0.01)).reply("?", "row 'a'")
        thread.join()


@pytest.mark.parametrize("url", ["http://localhost:port/v1", "http://local host/v1", "http://", "http://a/v1?b=c"])
def test_what_is_no_url_is_refused_before_any_work(url):
    with pytest.raises(ValueError, match=r"judge\.url is .*: give a URL"):
        ChatServer(url, "m")


def test_a_key_is_in_no_message(judging):
    server = judging(lambda prompt: "yes")
    assert ChatServer(server.url, "m", "secret\r\n", QUICK).reply("?", "row 1") == "yes"
    assert server.keys == ["Bearer secret"]
    with pytest.raises(ValueError, match=r"see to the variable") as raised:
        ChatServer(server.url, "m", "sec\nret")
    assert "ret" not in str(raised.value)


KEY = "sk-a/b+c~d'e&f=g\\h-0123"
ECHOES = {
    "as it is": KEY,
    "in JSON": json.dumps({"headers": {"Authorization": f"Bearer {KEY}"}}),
    "in JSON of PHP": json.dumps(f"Bearer {KEY}").replace("/", "\\/"),
    "in Python": repr({"Authorization": f"Bearer {KEY}"}),
    "in a URL": f"key={urllib.parse.quote(KEY, safe='')}&x=1",
    "in a URL with small letters": f"key={urllib.parse.quote_plus(KEY).lower()}",
    "in HTML": f"<b>{html.escape(KEY)}</b>",
    "in hexadecimal": KEY.encode().hex(),
    "in base64": base64.b64encode(KEY.encode()).decode(),
    "in base64 after a user": base64.b64encode(f"me:{KEY}".encode()).decode(),
    "in base64 of the header": base64.urlsafe_b64encode(f"Bearer {KEY}".encode()).decode(),
    "where an excerpt ends": "x" * 110 + KEY,
    "cut at its end": f"Invalid API key: {KEY[:17]}...",
    "cut at its beginning": f"Invalid API key: ***{KEY[-12:]}",
    "in JSON within JSON": json.dumps(json.dumps({"key": KEY[:19]})),
    "after white space": " " * 1990 + KEY,
}


def traces(text):
    """Parts of the key, and of what it is in base64 behind texts of any length."""
    parts = [KEY[start : start + 6] for start in range(len(KEY) - 5)]
    parts += [base64.b64encode(bytes(n) + KEY.encode()).decode()[n + 2 : -4] for n in range(3)]
    parts += [KEY.encode().hex()[4:], urllib.parse.quote(KEY[2:8], safe="")]
    return [part for part in parts if part.lower() in text.lower()]


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("echo", ECHOES)
def test_a_key_that_a_server_repeats_is_in_no_error_and_no_file(judging, echo, status, tmp_path, caplog):
    server = judging(lambda prompt: (status, f"headers: {ECHOES[echo]} end"))
    with pytest.raises(NoReply) as raised:
        ChatServer(server.url, "m", KEY, QUICK, tmp_path).reply("?", "row 1")
    assert server.keys[0] == f"Bearer {KEY}"
    shown = "".join(traceback.format_exception(raised.value)) + repr(raised.value) + caplog.text
    assert not traces(shown), shown
    assert "headers: " in shown
    assert (raised.value.__cause__, raised.value.__context__) == (None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_a_reply_repeats_is_kept_nowhere(judging, tmp_path):
    server = judging(lambda prompt: f"True, and your key is {KEY}.")
    assert ChatServer(server.url, "m", KEY, QUICK, tmp_path).reply("?", "row 1") == "True, and your key is ***."
    assert not any(traces(file.read_text()) for file in tmp_path.iterdir())
    # A placeholder is an ordinary word.
    assert "EMPTY" in ChatServer(judging(lambda prompt: "EMPTY").url, "m", "EMPTY", QUICK).reply("?", "row 1")


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 ", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 500 No\r\n\r\n"]
)
def test_a_reply_that_drips_has_one_time_limit(head):
    """However often a byte arrives."""
    end = threading.Event()

    def serve(listener):
        for _ in range(2):
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(head)
                while not end.wait(0.02):
                    connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with pytest.raises(NoReply, match=r"in 2 tries \(no whole reply within"):
            ChatServer(url, "m", None, Patience(read=0.3, tries=2, pause=0.01)).reply("?", "row 'a'")
        end.set()
        thread.join()


def test_all_tries_have_one_time_limit(judging):
    server = judging(lambda prompt: (500, "oops"))
    with pytest.raises(NoReply, match=r"did not answer .* in \d tries"):
        ChatServer(server.url, "m", None, Patience(read=5, tries=9, pause=0.2, total=0.5)).reply("?", "row 'a'")
    assert 1 <= len(server.asked) < 4


def test_a_reply_without_end_is_not_read_into_memory(judging):
    server = judging(lambda prompt: (200, "a" * (1 << 24) + "b"))
    with pytest.raises(NoReply, match="more than 16,777,216 bytes"):
        ChatServer(server.url, "m", None, QUICK).reply("?", "row 'a'")


@pytest.mark.parametrize("url", [f"http://me:{KEY}@localhost/v1", f"http://localhost/v1?key={KEY}"])
def test_a_key_in_a_url_is_not_shown(url):
    with pytest.raises(ValueError, match=r"judge\.url is .*http://") as raised:
        ChatServer(url, "m")
    assert not traces(str(raised.value))


def test_replies_are_kept_by_request(judging, tmp_path):
    server = judging(lambda prompt: f"so {prompt}")
    for _ in range(2):
        chat = ChatServer(server.url, "m", "secret", QUICK, tmp_path)
        assert [chat.reply(prompt, "row") for prompt in ("a", "b")] == ["so a", "so b"]
    assert len(server.asked) == 2
    ChatServer(server.url, "other", None, QUICK, tmp_path).reply("a", "row")
    assert len(server.asked) == 3
    assert not any("secret" in file.read_text() for file in tmp_path.iterdir())
    for file in tmp_path.iterdir():
        file.write_text("{}")
    with pytest.raises(ValueError, match=r"\.json is no reply that was kept"):
        ChatServer(server.url, "m", None, QUICK, tmp_path).reply("a", "row")
    for file in tmp_path.iterdir():
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(ValueError, match="no reply that was kept"):
        ChatServer(server.url, "m", None, QUICK, tmp_path).reply("a", "row")
