"""The judged samples of hallucination.py: both forms, a judge at a server, verdicts that are kept, paired rates."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import hallucination
from hallucination import main, verdict_of

KEY = "sk-secret-of-the-user"


@pytest.fixture
def server():
    """A judge that finds outputs with "true" accurate; its url, what it was asked, and the status that it gives."""

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][0]["content"]
            judge.asked.append(prompt)
            text = f"**Conclusion: {'true output' in prompt}**"
            answer = {"choices": [{"message": {"content": text}}]}
            self.send_response(judge.status)
            self.end_headers()
            error = {"error": f"the key {self.headers['Authorization']} is wrong"}
            self.wfile.write(json.dumps(answer if judge.status == 200 else error).encode())

        def log_message(self, *args):
            pass

    judge = HTTPServer(("127.0.0.1", 0), Judge)
    judge.asked, judge.status = [], 200
    judge.url = f"http://127.0.0.1:{judge.server_port}/v1"
    threading.Thread(target=judge.serve_forever, daemon=True).start()
    yield judge
    judge.shutdown()
    judge.server_close()


@pytest.fixture
def call(server, tmp_path, monkeypatch):
    """Two models' samples, one in each form, of which 10 and 15 of 20 are accurate; a call of the script on them."""
    ours, theirs = [], []
    for n in range(20):
        ours.append({"id": str(n), "document": f"doc {n}", "output": f"{n < 10} output".lower()})
        question = {"context": f"doc {n}", "input": "which?", "answers": ["a"]}
        answer = f"{n < 15} output".lower()
        theirs.append({"doc_id": n, "doc": question, "resps": [[answer]], "filtered_resps": [answer]})
    for name, samples in (("plain", ours), ("diff", theirs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(hallucination, "PAUSE", 0.0)

    def called(*arguments):
        words = ["plain=plain.jsonl", "diff=diff.jsonl", "--judge", "judge", "--url", server.url, *arguments]
        monkeypatch.setattr("sys.argv", ["hallucination.py", *words])
        main()

    return called


def test_two_models_are_compared_and_a_second_call_asks_nothing(call, server, capsys):
    call()
    printed = capsys.readouterr().out
    assert "plain: 10/20 accurate" in printed
    assert "diff: 15/20 accurate" in printed
    assert "diff - plain: +0.250" in printed
    assert len(server.asked) == 40
    assert "#Question#: which?" in server.asked[-1]
    call()
    assert len(server.asked) == 40


def test_a_run_resumes_and_no_message_has_the_key(call, server, capsys, tmp_path):
    server.status = 401
    with pytest.raises(SystemExit, match="401") as stopped:
        call()
    assert KEY not in str(stopped.value) + "".join(capsys.readouterr())
    server.status = 503
    with pytest.raises(SystemExit, match="503"):
        call()
    assert len(server.asked) == 1 + hallucination.TRIES
    server.status = 200
    call()
    assert KEY not in "".join(path.read_text() for path in (tmp_path / "hallucination").iterdir())


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("It follows.\n**Conclusion: True**", True),
        ("conclusion : false", False),
        ("**Conclusion: True** ... **Conclusion: False**", None),
        ("Conclusion: partly true", None),
        ("True", None),
    ],
)
def test_the_verdict_of_a_reply(reply, verdict):
    assert verdict_of(reply) is verdict
