"""The flash-attn backend. No library runs without a GPU: functions that bind each call to the signatures of released
packages (`tests/assets/flash_signatures.json`), with their refusals, stand in, so that layout, pairing, widening and
pieces are compared with the formula; what is installed is tested where it is."""

import sys

import pytest
import torch
from oracle import tensors
from stand_ins import RELEASES, StandIn

from diffvision.ops.attention import Problem, flash, reference

PROBLEM = Problem(2, 4, 4, 65, 65, 64, 128, dtype=torch.bfloat16, device="cuda")


@pytest.fixture(params=RELEASES)
def stand_in(request, monkeypatch):
    made = StandIn(request.param)
    monkeypatch.setattr(flash, "find_libraries", made.libraries)
    return made


@pytest.mark.parametrize("keys", [1, 2])
def test_equal_sizes_are_views_of_what_came(keys, stand_in):
    q, k, v, lam = tensors(keys=keys, d=16)
    flash.diff_attention(q, k, v, lam, causal=False, mask=None, scale=0.25, dropout=0.0)
    for given in stand_in.calls:
        for own, seen in zip((q, k, v), given, strict=True):
            assert seen.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("sizes", "one_size", "unequal"),  # of queries and values, and (pieces, their size, the values' size) of both kinds
    [
        ((64, 64), (1, 64, 64), (1, 64, 64)),
        ((64, 128), (1, 128, 128), (1, 64, 128)),  # widened: the work of two pieces with half the exponentials
        ((128, 256), (2, 128, 128), (2, 128, 128)),  # in pieces: the kernels of size 256 are the slower
        ((32, 33), (1, 40, 40), (1, 32, 40)),
        ((64, 512), (4, 128, 128), (2, 64, 256)),
        ((72, 144), (2, 72, 72), (2, 72, 72)),  # FlashAttention-3's kernels above 64 take one size
    ],
)
def test_the_least_work_is_chosen_and_flash_attention_3_takes_wide_values_as_they_are(sizes, one_size, unequal):
    for largest in (128, 256):
        assert flash.plan(*sizes, largest=largest) == one_size
    assert flash.plan(*sizes, largest=256, equal_sizes=False) == unequal


LIMITS = {
    "device": ({"device": "cpu"}, "cuda, not on cpu"),
    "dtype": ({"dtype": torch.float32}, "torch.float32"),
    "dropout": ({"dropout": 0.1}, "dropout 0.1"),
    "mask": ({"masked": True}, "Documents"),
    "no keys": ({"keys": 0}, "0 keys"),
    "head size": ({"head_dim": 264}, "head size 264: {} is used up to {}"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_limit_names_the_value(case, stand_in):
    change, message = LIMITS[case]
    assert flash.limit(PROBLEM) is None
    message = message.format(stand_in.package.name, stand_in.package.largest)
    assert message in flash.limit(PROBLEM._replace(**change))


def test_what_cannot_be_traced_is_refused_in_a_compiled_graph(monkeypatch):
    monkeypatch.setattr(flash, "find_libraries", StandIn("flash-attn-4 4.0.0b36").libraries)
    assert flash.limit(PROBLEM) is None
    assert torch.compile(lambda: flash.limit(PROBLEM) is not None, backend="eager", fullgraph=True)()


@pytest.fixture
def both(monkeypatch):
    """Two libraries, of which the first is preferred."""

    def install(*releases):
        made = [StandIn(release) for release in releases]
        monkeypatch.setattr(flash, "find_libraries", lambda: tuple(one.libraries()[0] for one in made))
        return made

    return install


def attend(**sizes):
    inputs = tensors(**sizes)
    settings = {"causal": False, "mask": None, "scale": 0.25, "dropout": 0.0}
    out, expected = (module.diff_attention(*inputs, **settings) for module in (flash, reference))
    torch.testing.assert_close(out, expected)


def test_a_problem_that_one_cannot_take_goes_to_the_next(both):
    fourth, second = both("flash-attn-4 4.0.0b36", "flash-attn 2.8.3.post2")
    assert flash.limit(PROBLEM._replace(head_dim=136)) is None
    attend(d=136, v=136)
    assert (len(fourth.calls), len(second.calls)) == (0, 2)
    attend(d=64, v=64)
    assert (len(fourth.calls), len(second.calls)) == (2, 2)
    reasons = flash.limit(PROBLEM._replace(head_dim=264))
    assert "FlashAttention-4 is used up to 128" in reasons
    assert "flash-attn 2 is used up to 256" in reasons


def test_in_a_graph_the_traceable_one_is_taken(both):
    both("flash-attn-4 4.0.0b36", "flash-attn 2.8.3.post2")
    named = torch.compile(lambda: flash._library(64).package.name, backend="eager", fullgraph=True)
    assert flash._library(64).package.name == "FlashAttention-4"
    assert named() == "flash-attn 2"


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic", "stand_in")
@pytest.mark.parametrize("keys", [1, 2])
def test_each_library_is_told_to_be_deterministic(keys):
    attend(keys=keys, d=64, v=64 * keys)


@pytest.mark.usefixtures("deterministic")
def test_flash_attention_3_is_deterministic_only_below_256(both):
    third, second = both("FlashAttention-3 3.0.0 at 0251105a", "flash-attn 2.8.3.post2")
    attend(d=64, v=256)  # its values are cut: 192 is the most
    assert [v.shape[-1] for _, _, v in third.calls] == [128] * 4
    assert {q.shape[-1] for q, _, _ in third.calls} == {64}
    attend(d=200, v=200)
    assert len(second.calls) == 2
    (third,) = both("FlashAttention-3 3.0.0 at 0251105a")
    assert "FlashAttention-3 is used up to 192 deterministically" in flash.limit(PROBLEM._replace(head_dim=200))
    with pytest.raises(ValueError, match="sdpa"):
        attend(d=200, v=200)


# What is installed


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder on the path of its own, where a test writes packages; what was found before is forgotten."""
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "flash" not in p)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(flash, "_found", {})
    flash._search_once.cache_clear()

    def write(file, text):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    yield write
    flash._search_once.cache_clear()
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


FUNCTIONS = "def flash_attn_func(): return __name__\ndef flash_attn_varlen_func(): return __name__\n"


BUILD = "CONFIG = {'build_flags': {'FLASHATTENTION_DISABLE_BACKWARD': False, 'FLASH_ATTENTION_DISABLE_HDIMDIFF64': %s}}"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "pip install"),
        ({"flash_attn/other/__init__.py": ""}, "flash_attn is not installed"),  # a namespace package
        ({"flash_attn/__init__.py": ""}, "flash_attn_func"),
        ({"flash_attn/__init__.py": "raise ImportError('undefined symbol: _ZN3c105')"}, "undefined symbol"),
        ({"flash_attn/cute/__init__.py": "import no_such_compiler"}, "flash_attn.cute needs no_such_compiler"),
        ({"flash_attn_interface.py": FUNCTIONS}, "needs flash_attn_config"),
        ({"flash_attn_interface.py": FUNCTIONS, "flash_attn_config.py": BUILD % True}, "DISABLE_HDIMDIFF64"),
    ],
)
def test_what_cannot_be_used_is_none_and_says_why(files, reason, packages):
    for file, text in files.items():
        packages(file, text)
    assert reason in flash.find_libraries()
    assert flash.limit(PROBLEM) == flash.find_libraries()


@pytest.fixture
def all_installed(packages):
    packages("flash_attn/__init__.py", FUNCTIONS)
    packages("flash_attn/cute/__init__.py", FUNCTIONS)
    packages("flash_attn_interface.py", FUNCTIONS)
    packages("flash_attn_config.py", BUILD % False)
    return packages


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (80, ["flash-attn 2"]),
        (89, ["flash-attn 2"]),
        (90, ["FlashAttention-3", "FlashAttention-4", "flash-attn 2"]),
        (100, ["FlashAttention-4", "flash-attn 2"]),
        (110, ["FlashAttention-4", "flash-attn 2"]),
        (120, ["flash-attn 2"]),
    ],
)
def test_the_gpu_decides_between_them(all_installed, capability, names, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash, "compute_capability", lambda: capability)
    assert [library.package.name for library in flash.find_libraries()] == names
