"""The kernel in C: forms of inputs in float32 against the formula in float64, and how it is compiled, kept and refused.

tests/ops/test_battery.py has what every backend promises.
"""

import _ctypes
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from diffvision.ops import attention_backend, diff_attention
from diffvision.ops.attention.native import KEEP_MAPS_MAX_KEYS, build

pytestmark = pytest.mark.skipif(bool(build.reason_against()), reason=build.reason_against())

FORMS = {
    "v1": {},
    "v1, grouped": {"hk": 2},
    "v2": {"maps": 1, "v": 8},
    "v2, grouped": {"hk": 1, "maps": 1, "v": 8},
    "odd sizes": {"d": 7, "v": 5},
    "lambda of each head": {"lam": (4, 1, 1)},
    "lambda of each token": {"lam": (2, 4, 70, 1)},
    "one query": {"m": 1},
    "a cache of keys": {"m": 20, "n": 90},
    "more queries than keys": {"m": 90, "n": 20},
    "several blocks": {"m": 300, "n": 300},
    "maps computed again": {"m": 130, "n": KEEP_MAPS_MAX_KEYS + 1},
}


def tensors(b=2, h=4, hk=None, m=70, n=None, d=8, v=16, maps=2, lam=(1,)):
    hk, n = hk or h, n or m
    made = [torch.randn(b, h, 2, m, d), torch.randn(b, hk, maps, n, d), torch.randn(b, hk, n, v), torch.rand(lam)]
    return [t.requires_grad_() for t in made]


def assert_right(inputs, **settings):
    """Output and gradients of random weights are the formula's."""
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out = diff_attention(*inputs, backend="native", **settings)
    true = diff_attention(*exact, backend="eager", **settings)
    torch.testing.assert_close(out.double(), true, rtol=0, atol=5e-6)
    weight = torch.randn(true.shape)
    grads = torch.autograd.grad(out, inputs, weight)
    for got, want in zip(grads, torch.autograd.grad(true, exact, weight.double()), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 * max(1.0, want.abs().max().item()))


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form, causal):
    inputs = tensors(**FORMS[form])
    shape = (2, 4, inputs[0].shape[3], inputs[1].shape[3])
    assert_right(inputs, causal=causal)
    pairs = torch.rand(shape) > 0.3
    pairs[0, 1, 0] = False
    for mask in (pairs, pairs[:, :1, :1], pairs[:1, :, :, :1], pairs[0, 0, 0]):
        assert_right(inputs, causal=causal, mask=mask)


@pytest.mark.parametrize("scale", [0.0, -0.25, 1e-8, 3.0])
def test_any_finite_scale(scale):
    assert_right(tensors(), scale=scale, causal=True)


def test_rows_before_the_first_key_and_no_keys_at_all():
    inputs = tensors(b=1, h=10, hk=2, m=232, n=93, d=24, v=5, maps=1)
    assert_right(inputs, causal=True)
    assert (diff_attention(*inputs, causal=True, backend="native")[:, :, :139] == 0).all()
    q, k, v, lam = tensors()
    for rows, keys in ((70, 0), (0, 70)):
        out = diff_attention(q[:, :, :, :rows], k[:, :, :, :keys], v[:, :, :keys], lam, backend="native")
        assert (out == 0).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v, lam)))


def test_layouts_that_are_no_row_major_matrices():
    q, k, v, lam = tensors()
    columns = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)]
    assert_right([*(t.detach().requires_grad_() for t in columns), lam])
    one = [t.detach()[..., :1, :].transpose(-1, -2).contiguous().mT.requires_grad_() for t in (q, k, v)]
    assert_right([*one, lam])  # a matrix of one row, in steps of one number
    far = [torch.as_strided(t.detach().clone(), t.shape, (*t.stride()[:-2], 2**32, 1)) for t in one]
    assert_right([*(t.requires_grad_() for t in far), lam])
    everyone = [t.detach()[:, :, ..., :1, :].expand_as(t).requires_grad_() for t in (q, k, v)]  # rows in one place
    assert_right([*everyone, lam])
    out = diff_attention(q, k, v, lam, backend="native")
    gradient = torch.randn(()).expand_as(out)  # of a sum: no strides at all
    true = torch.autograd.grad(diff_attention(q, k, v, lam, backend="eager"), (q, k, v, lam), gradient)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v, lam), gradient), true, rtol=1e-6, atol=2e-5)
    out = diff_attention(q, k, v, lam, backend="native")
    out *= 2  # as torch's results, it may be changed in place
    out.sum().backward()


def test_threads_change_no_bit_and_gradients_can_be_asked_for_twice():
    inputs = tensors(b=3, h=6, hk=3, m=200)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = diff_attention(*inputs, causal=True, backend="native")
            first = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
            assert all(map(torch.equal, first, torch.autograd.grad(out.square().sum(), inputs)))
            results.append((out, *first))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_not_hidden(value):
    q, k, v, lam = (t.detach() for t in tensors())
    q[1, 2, 0, 5] = value
    out = diff_attention(q, k, v, lam, backend="native")
    assert out[1, 2, 5].isnan().all()
    assert out[0].isfinite().all()
    q.fill_(value)
    assert diff_attention(q, k, v, lam, backend="native").isnan().all()


def test_a_whole_model():
    import timm

    model = timm.create_model("diff_vit_debug", num_classes=10)
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    with torch.no_grad():
        expected = model(images)
        with attention_backend("native"):
            torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)


# ---- the compiler --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder without a kernel, and nothing remembered of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._find_kernel.cache_clear()
    yield tmp_path / "diffvision" / "kernels"
    build._find_kernel.cache_clear()


def works():
    q, k, v, lam = tensors()
    with torch.no_grad():
        torch.testing.assert_close(
            diff_attention(q, k, v, lam, backend="native"), diff_attention(q, k, v, lam, backend="eager")
        )
    return True


def kept(cache):
    return list(cache.iterdir())


def test_it_is_compiled_once(cache, monkeypatch):
    before = os.umask(0o002)
    try:
        assert works()
    finally:
        os.umask(before)
    [file] = kept(cache)
    build._find_kernel.cache_clear()
    monkeypatch.setattr(build, "_compiler", lambda: "none")  # no longer there, nor needed
    assert works()
    assert kept(cache) == [file]


DAMAGE = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "changed": lambda file: file.write_bytes(file.read_bytes().replace(b"\0\0\0\0", b"\0\1\0\0", 1)),
    "empty": lambda file: os.truncate(file, 0),
    "random": lambda file: file.write_bytes(os.urandom(9999)),
    "another library": lambda file: file.write_bytes(Path(_ctypes.__file__).read_bytes()),
    "a folder": lambda file: (file.unlink(), (file / "inside").mkdir(parents=True)),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a link": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "others may write": lambda file: file.chmod(0o722),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A library as the compiler writes it."""
    library = tmp_path_factory.mktemp("compiled") / "kernel.so"
    subprocess.run([*build._compiler(), *build._flags(), str(build.SOURCE), "-o", str(library), "-lm"], check=True)
    return library


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_kernel_is_compiled_again(cache, damage, compiled, tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; cp {compiled} "$2"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert build.reason_against() == ""
    [file] = kept(cache)
    before = file.read_bytes()
    assert before.startswith(compiled.read_bytes())
    DAMAGE[damage](file)
    (cache / ".kernel-of-a-killed-process.part").mkdir()
    build._find_kernel.cache_clear()
    assert works()
    assert kept(cache) == [file]
    assert not file.is_symlink()
    assert file.read_bytes() == before
    assert stat.S_IMODE(file.stat().st_mode) == 0o700


@pytest.fixture
def reachable(cache, monkeypatch):
    """A cache folder that other users can reach, as they cannot reach pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        yield Path(folder, "diffvision", "kernels")


@pytest.mark.parametrize("place", ["", "..", "../.."], ids=["itself", "above it", "far above it"])
def test_a_folder_that_others_may_write_is_not_used(reachable, place):
    reachable.mkdir(parents=True)
    (reachable / place).chmod(0o777)
    file = reachable / build._name()
    file.write_bytes(b"of somebody else")
    assert works()  # from a temporary folder
    assert file.read_bytes() == b"of somebody else"
    assert list(reachable.iterdir()) == [file]


def test_a_folder_whose_names_others_cannot_change_is_used(reachable):
    (reachable.parent / "elsewhere").mkdir(parents=True)
    reachable.symlink_to("elsewhere")
    assert build._folder() is None
    reachable.unlink()
    assert build._folder() == reachable
    reachable.parent.chmod(0o1777)  # as /tmp is
    assert build._folder() == reachable
    reachable.parent.chmod(0o777)
    assert build._folder() is None
    reachable.parent.parent.chmod(0o700)  # which nobody else can enter
    assert build._folder() == reachable


def test_a_folder_that_cannot_be_made(cache):
    cache.parent.write_text("a file")
    assert works()


def fails(reason):
    build._find_kernel.cache_clear()
    with pytest.raises(ValueError, match=f"'native' cannot take this call: {reason}"):
        works()


def test_compilers_that_are_not_there_or_fail(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "gcc -m64")
    assert works()
    [file] = kept(cache)
    file.unlink()
    monkeypatch.setenv("CC", 'gcc "')
    fails("the variable CC is 'gcc \"'")
    monkeypatch.setenv("CC", "a_compiler -m64")
    fails("the variable CC names 'a_compiler', which is not there")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    fails("no C compiler was found: install gcc or clang, or name one in the variable CC")
    broken = tmp_path / "cc"
    monkeypatch.setenv("CC", str(broken))
    for program, reason in (
        ("sys.exit('unknown option')", f"its kernel cannot be compiled by {broken}: unknown option"),
        ("open(sys.argv[sys.argv.index('-o') + 1], 'w')", "its kernel cannot be compiled or loaded: "),
        (
            f"import shutil; shutil.copy({_ctypes.__file__!r}, sys.argv[-2])",
            "its kernel cannot be compiled or loaded: .*undefined symbol",
        ),
        ("import time; time.sleep(60)", f"its kernel cannot be compiled: {broken} took more than 0 s"),
    ):
        broken.write_text(f"#!{sys.executable}\nimport sys\n{program}\n")
        broken.chmod(0o700)
        monkeypatch.setattr(build, "SECONDS", 0.3 if "sleep" in program else 60.0)
        fails(reason)
        assert kept(cache) == []


def test_other_processors_and_systems(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NEON")
    assert "AVX2 or AVX512, torch found NEON" in build._find_kernel.__wrapped__()
    monkeypatch.setattr(build.sys, "platform", "darwin")
    assert "on Linux only, this is darwin" in build._find_kernel.__wrapped__()


def test_instructions_of_older_processors(cache, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for form in ("v1", "several blocks"):
        assert_right(tensors(**FORMS[form]), causal=True)


@pytest.mark.slow
def test_processes_that_compile_at_once_leave_one_file(tmp_path):
    program = (
        "import torch; from diffvision.ops import diff_attention as f;"
        "q, k, v = torch.randn(1, 2, 2, 9, 8), torch.randn(1, 2, 2, 9, 8), torch.randn(1, 2, 9, 16);"
        "torch.testing.assert_close(f(q, k, v, 0.5, backend='native'), f(q, k, v, 0.5, backend='eager'))"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", program], env=env) for _ in range(2)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    assert len(kept(tmp_path / "diffvision" / "kernels")) == 1
