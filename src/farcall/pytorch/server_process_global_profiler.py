"""`_server_process_global_profile`: profiles what this worker runs for others."""

from __future__ import annotations

from typing import Any

_server_process_global_profile: Any = None
