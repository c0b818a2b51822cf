"""omni-rt: a runtime for any-to-any models on one box."""

import importlib
from typing import TYPE_CHECKING, Any

from omni_rt.errors import (
    BadRequest,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    OmniError,
    Overloaded,
    StageFailed,
    StageUnavailable,
)
from omni_rt.request import (
    Audio,
    ChatMessage,
    Data,
    Done,
    Image,
    Output,
    Progress,
    Request,
    Text,
)
from omni_rt.runtime.omni import AsyncOmni, Omni
from omni_rt.runtime.status import StageStatus, Status
from omni_rt.runtime.stream import Stream

if TYPE_CHECKING:
    from omni_rt.compat import (
        AsyncOmniLLM,
        DiTCacheConfig,
        DiTCacheTensor,
        DiTConfig,
        MultimodalOutputProcessor,
        OmniLLM,
        OmniServeCommand,
        OmniStageConfig,
        RequestOutput,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncOmni",
    "AsyncOmniLLM",
    "Audio",
    "BadRequest",
    "Cancelled",
    "ChatMessage",
    "ConfigError",
    "Data",
    "DeadlineExceeded",
    "DiTCacheConfig",
    "DiTCacheTensor",
    "DiTConfig",
    "Done",
    "Image",
    "MultimodalOutputProcessor",
    "Omni",
    "OmniError",
    "OmniLLM",
    "OmniServeCommand",
    "OmniStageConfig",
    "Output",
    "Overloaded",
    "Progress",
    "Request",
    "RequestOutput",
    "StageFailed",
    "StageStatus",
    "StageUnavailable",
    "Status",
    "Stream",
    "Text",
]

# vLLM-omni's names, loaded when somebody asks for one.
_COMPAT = frozenset(
    {
        "AsyncOmniLLM",
        "DiTCacheConfig",
        "DiTCacheTensor",
        "DiTConfig",
        "MultimodalOutputProcessor",
        "OmniLLM",
        "OmniServeCommand",
        "OmniStageConfig",
        "RequestOutput",
    }
)


def __getattr__(name: str) -> Any:
    if name in _COMPAT:
        return getattr(importlib.import_module("omni_rt.compat"), name)
    raise AttributeError(f"module 'omni_rt' has no attribute '{name}'")
