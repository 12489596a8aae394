"""Settings of every test: one thread a worker (two workers share two cores) and a fixed seed."""

import hashlib
import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

ASSETS = Path(__file__).parent / "assets"
GPU_BYTES = 4 << 30  # of a GPU's memory for a test


pytest_plugins = ["language_fixtures"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-all", action="store_true", help="with -m faults: every cell of the resume matrix")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the cases that `quick` leaves out, and sort tests that train in forked processes to the front.

    What some others start (compiled graphs, threads of autograd) does not survive a fork, and autograd then refuses to
    work there.
    """
    # A case of a GPU stays with `pytest -m gpu`, one that is too long with `pytest -m nightly`.
    collected: dict[str, set[str]] = {}  # name of a test with `quick` -> ids of its cases
    for item in items:
        if (quick := item.get_closest_marker("quick")) is not None:
            case = item.callspec.id  # type: ignore[attr-defined]
            collected.setdefault(item.nodeid.partition("[")[0], set()).add(case)
            if case not in quick.args and not {"gpu", "nightly"} & {marker.name for marker in item.iter_markers()}:
                item.add_marker(pytest.mark.slow)
    for item in items:
        quick, cases = item.get_closest_marker("quick"), collected.get(item.nodeid.partition("[")[0], set())
        if quick is not None and len(cases) > len(quick.args) and not cases.issuperset(quick.args):
            raise pytest.UsageError(f"{item.nodeid}: quick names cases that do not exist: {set(quick.args) - cases}")
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """A shell that starts pytest in the background has it ignore SIGINT, which tests send."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _gpu_memory(request, record_property):
    """A test marked `gpu` runs out of memory above 4 GiB, and records the peak of what it allocates."""
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_per_process_memory_fraction(min(1.0, GPU_BYTES / torch.cuda.get_device_properties(0).total_memory))
    torch.cuda.reset_peak_memory_stats()
    yield
    record_property("mib", round(torch.cuda.max_memory_allocated() / 2**20, 1))


@pytest.fixture
def assets() -> Path:
    return ASSETS


class _Hub:
    """A server that has models as the Hugging Face Hub has them, and notes which files it is asked for."""

    def __init__(self):
        self.files, self.asked = {}, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                content, headers = hub.answer(self.path)
                self.send_response(404 if content is None else 200)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content or b"")

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def add(self, repository, folder):
        """Put the files of a folder into a repository."""
        self.files[repository] = {path.name: path.read_bytes() for path in folder.iterdir()}

    def answer(self, path):
        owner, name, *rest = path.removeprefix("/api/models").strip("/").split("/")
        files = self.files.get(f"{owner}/{name}")
        if files is None:
            return None, {"X-Error-Code": "RepoNotFound"}
        if "tree" in rest:
            rows = [{"type": "file", "path": file, "size": len(files[file]), "oid": "cd" * 20} for file in files]
            return json.dumps(rows).encode(), {}
        if path.startswith("/api/"):
            about = {"id": f"{owner}/{name}", "sha": "ab" * 20, "siblings": [{"rfilename": file} for file in files]}
            return json.dumps(about).encode(), {}
        self.asked.append(rest[-1])
        content, commit = files.get(rest[-1]), {"X-Repo-Commit": "ab" * 20}
        if content is None:
            return None, {"X-Error-Code": "EntryNotFound", **commit}
        return content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', **commit}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the Hugging Face Hub, which huggingface_hub takes for it, with an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    made = _Hub()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, made.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", made.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def weights():
    """A function that returns a file of trained weights below DIFFVISION_WEIGHTS, and skips the test without it."""

    def find(name, sha256):
        folder = os.environ.get("DIFFVISION_WEIGHTS")
        for path in Path(folder).rglob(name) if folder else ():
            if hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
                return path
        return pytest.skip(f"no {name} of sha256 {sha256} below DIFFVISION_WEIGHTS: see docs/guides/weights.md")

    return find
