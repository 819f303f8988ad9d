"""Which versions belong together on Ascend, as Ascend's compatibility page says (github.com/Ascend/pytorch)."""

from __future__ import annotations

TABLE_DATE = "2026-08"

CANN_OF_TORCH_NPU = {
    **dict.fromkeys(("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"), "9.1.0"),
    **dict.fromkeys(("2.10.0.post2", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"), "9.0.0"),
    **dict.fromkeys(("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"), "8.5.0"),
    **dict.fromkeys(("2.8.0", "2.7.1", "2.6.0.post3"), "8.3.RC1"),
    **dict.fromkeys(("2.6.0", "2.5.1.post1"), "8.2.RC1"),
    "2.5.1": "8.1.RC1",
    "2.4.0.post2": "8.0.0",
}
"""torch_npu version to CANN version."""

PYTHON_OF_TORCH = {
    "2.12": ((3, 10), (3, 14)),
    "2.11": ((3, 10), (3, 14)),
    "2.10": ((3, 10), (3, 13)),
    "2.9": ((3, 10), (3, 13)),
}
"""First and last Python version that torch_npu of a torch version is built for."""
