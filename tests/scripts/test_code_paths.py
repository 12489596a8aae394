"""The count of functions on a code path: which functions count, and that a path can be listed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import code_paths
from diffvision.ops import rms_norm, rotary_tables

SCRIPT = Path(code_paths.__file__)


def test_a_function_counts_once_and_only_where_it_is_ours():
    counter = code_paths.Counter()
    x, weight = torch.ones(2, 4), torch.ones(4)
    with torch.no_grad(), counter.counting():
        for _ in range(2):
            rms_norm(x, weight, 1e-5)
        torch.nn.functional.silu(x)
    names = [function.split()[-1] for function in counter.functions.values()]
    assert names[0] == "rms_norm"
    assert len(names) == len(set(names))
    assert "silu" not in names
    assert all("<" not in name for name in names)


def test_the_count_ends_when_a_named_function_returns():
    counter = code_paths.Counter()
    with counter.counting(until="rotary_tables"):
        rotary_tables(torch.arange(3), 4)
        rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
    assert [function.split()[-1] for function in counter.functions.values()] == ["rotary_tables"]


@pytest.mark.nightly
def test_a_path_is_counted_and_listed():
    words = [sys.executable, str(SCRIPT), "--only", "block", "--list"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    [row] = re.findall(r"\| a warm block of diff_vit_debug \| (\d+) \| (\d+) \| (\d+) \|", printed)
    functions, names, _ = map(int, row)
    listed = [line for line in printed.splitlines() if line.startswith("  ")]
    assert len(listed) == functions >= names
    assert "AttentionLayer.forward" in printed
