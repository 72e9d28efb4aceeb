import pytest
import torch

from spes_mega.node.sync.spool import TensorSpool


def test_tensors_come_back_bit_for_bit_and_leave_no_file(tmp_path):
    first = torch.randn(3, 5)
    second = torch.arange(6, dtype=torch.bfloat16).view(2, 3).T  # not contiguous
    with TensorSpool(tmp_path) as spool:
        spool.put("a", first)
        spool.put("b", second)
        spool.put("none", torch.empty(0, 4))
        assert list(tmp_path.iterdir()) == []
        assert torch.equal(spool.get("b"), second)
        assert torch.equal(spool.get("a"), first)
        assert spool.get("none").shape == (0, 4)
        assert spool.get("b").dtype == torch.bfloat16
        with pytest.raises(KeyError):
            spool.get("c")
