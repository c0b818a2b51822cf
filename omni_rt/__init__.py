"""omni-rt: a runtime for any-to-any models on one box."""

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

__version__ = "0.1.0"

__all__ = [
    "AsyncOmni",
    "Audio",
    "BadRequest",
    "Cancelled",
    "ChatMessage",
    "ConfigError",
    "Data",
    "DeadlineExceeded",
    "Done",
    "Image",
    "Omni",
    "OmniError",
    "Output",
    "Overloaded",
    "Progress",
    "Request",
    "StageFailed",
    "StageStatus",
    "StageUnavailable",
    "Status",
    "Stream",
    "Text",
]
