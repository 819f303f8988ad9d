"""Licences with terms that whoever runs a model must know, said where the model is met. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPENPANGU = (
    "openPangu is under the OPENPANGU MODEL LICENSE AGREEMENT VERSION 1.0: it may not be used within the European "
    "Union; who passes it on passes on the agreement and its notices; a product or service built on it shows "
    "'Powered by openPangu' and 'openPangu is a trademark of Huawei Technologies Co., Ltd.'"
)

_BY_MODEL_TYPE = {"PanguEmbedded": OPENPANGU}


def licence_notice(config: Mapping[str, Any]) -> str:
    """What there is to know of a model's licence, from its config.json; empty for most."""
    return _BY_MODEL_TYPE.get(str(config.get("model_type")), "")
