import pytest
import torch
import torch.nn.functional as F

from diffvision.nn import linear as room
from diffvision.nn.linear import Linear, few_rows_linear, linear


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(24,), (1, 1, 24), (3, 24), (4, 2, 24), (0, 24)])
def test_few_rows_equal_torch_s_linear(shape, threads, monkeypatch):
    """Also where the threads do not divide the rows of the weight."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows in (32, 31):
        x, weight = torch.randn(shape), torch.randn(rows, 24)
        torch.testing.assert_close(few_rows_linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)


def test_taken_only_without_gradients_for_few_rows(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(room, "few_rows_linear", lambda x, weight: calls.append(len(x)) or F.linear(x, weight))
    layer = Linear(512, 512, bias=False)
    x = torch.randn(17, 512)
    layer(x[:2])
    with torch.no_grad():
        layer(x)
        layer(x[:16])
        linear(x[:3], layer.weight)
        Linear(512, 512)(x[:4])
        Linear(512, 255, bias=False)(x[:5])
        layer.double()(x[:6].double())
        layer.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x[:7]).dtype == torch.bfloat16
    assert calls == [16, 3]
