"""Latencies in few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def micros(name: str, seconds: list[float]) -> dict[str, Any]:
    """`name_p50_us` and `name_p95_us` of times in seconds."""
    return {f"{name}_p{share}_us": float(np.percentile(seconds, share)) * 1e6 for share in (50, 95)}
