"""`HostCopy`: the values that a tensor had when the copy was started."""

from __future__ import annotations

import torch

from clearhead.base.host_copy import HostCopy


def test_later_changes_of_the_tensor_do_not_reach_the_copy() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = torch.arange(6.0, device=device).view(2, 3).T
    copied, expected = HostCopy(values), values.tolist()
    values.zero_()
    assert copied.read().tolist() == expected and copied.read().device.type == "cpu"
