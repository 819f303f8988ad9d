"""What a version of a package says of whom it belongs with."""

from __future__ import annotations

import re


def release_of(version: str) -> str:
    """x.y.z of a version: "2.7.1.post2+git1234" -> "2.7.1"; a torch and a torch_npu of one release go together."""
    numbers = re.match(r"\d+\.\d+\.\d+", version)
    return numbers.group() if numbers else version
