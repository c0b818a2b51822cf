"""/v1/models."""

from __future__ import annotations

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from omni_rt.server.state import Served


class Capabilities(msgspec.Struct):
    input: list[str]
    output: list[str]


class Model(msgspec.Struct):
    id: str
    created: int
    capabilities: Capabilities
    state: str
    object: str = "model"
    owned_by: str = "omni-rt"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: str = "list"


@get("/v1/models", sync_to_thread=False)
def list_models(served: NamedDependency[Served]) -> ModelList:
    return ModelList([_model(served)])


@get("/v1/models/{model:path}", sync_to_thread=False)
def get_model(served: NamedDependency[Served], model: FromPath[str]) -> Model:
    served.check_model(model.removeprefix("/"))  # a name may have slashes of its own
    return _model(served)


def _model(served: Served) -> Model:
    kinds = sorted(set(served.omni.kinds().values()))
    state = served.omni.status().state
    return Model(served.name, served.created, Capabilities(["text"], kinds), state)
