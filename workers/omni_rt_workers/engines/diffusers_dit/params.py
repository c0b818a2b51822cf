"""What a pipeline takes, read from the signature of its `__call__`, and a request's call of it."""

from __future__ import annotations

import inspect
import math
import re
from typing import TYPE_CHECKING, Any, Literal

import torch

from omni_rt.errors import BadRequest, ConfigError, nearest
from omni_rt.wire.messages import ParamProduct, ParamSpec, Ports, PortSpec
from omni_rt_workers.engines.diffusers_dit import limits as bounds
from omni_rt_workers.engines.diffusers_dit.shell import compatible_schedulers

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_rt_workers.engine import Task
    from omni_rt_workers.engines.diffusers_dit.limits import Limits

# The engine gives these itself, or a request has no say in them.
_OWN = ("self", "prompt", "generator", "output_type", "return_dict", "num_images_per_prompt")
_ENGINES = (
    "seed",
    "exact",
    "scheduler",
    "preview_every",
)  # parameters that the engine has beside the pipeline's
_OF_TEXT = ("max_sequence_length", "clip_skip", "clean_caption")
_KINDS: tuple[Literal["str", "float", "int", "bool"], ...] = ("str", "float", "int", "bool")


class CallForm:
    """Turns a request into the keyword arguments of one pipeline's `__call__`."""

    def __init__(
        self,
        stage: str,
        pipeline: Any,
        limits: Limits,
        *,
        defaults: dict[str, Any] | None = None,
        room: int | None = None,
    ) -> None:
        """`defaults`: the stage's own for parameters that a request leaves out. `room`: bytes of
        memory beside the weights, if known."""
        self.stage = stage
        self._pipeline = pipeline
        self._limits = limits
        self._defaults = defaults or {}
        self._most_pixels = bounds.most_pixels(pipeline, limits, room)
        self._parameters = dict(inspect.signature(type(pipeline).__call__).parameters)
        self.reads_text = _has_part(pipeline, "text_encoder")
        self._tensor_inputs = _tensor_inputs(self._parameters)
        self.params = tuple(self._param_specs())
        if "prompt" in self._parameters and not self.reads_text and not self._takes_embeddings:
            raise ConfigError(
                f"stage '{stage}': {type(pipeline).__name__} takes no prompt_embeds and no text "
                "encoder was loaded, so it cannot be told what to make",
                stage=stage,
                hint="load the pipeline with its text encoder",
            )

    def ports(self, slots: int, *, previews: bool = False) -> Ports:
        outputs = [PortSpec("latents", "tensor")] if "output_type" in self._parameters else []
        if "num_frames" not in self._parameters:
            outputs.insert(0, PortSpec("image", "image"))
        if previews:
            outputs.append(PortSpec("preview", "image"))
        inputs = [*self._tensor_inputs]
        if self.reads_text and "prompt" in self._parameters:
            inputs.insert(0, PortSpec("prompt", "text"))
        return Ports(tuple(inputs), tuple(outputs), self.params, slots, products=self._products())

    def _products(self) -> tuple[ParamProduct, ...]:
        """The limit of height x width x frames."""
        names = [n for n in ("height", "width", "num_frames") if n in self._parameters]
        if self._most_pixels is None or not names:
            return ()
        defaults = tuple(float(self._default(name) or 0) for name in names)
        return (ParamProduct(tuple(names), defaults, float(self._most_pixels), "pixels"),)

    def _default(self, name: str) -> Any:
        """What a parameter is if nobody gives it; None if only the pipeline knows."""
        value = self._defaults.get(name)
        if value is None and name in self._parameters:
            value = self._parameters[name].default
        if value is None and name in ("height", "width"):
            config = getattr(getattr(self._pipeline, "unet", None), "config", None)
            side = getattr(self._pipeline, "default_sample_size", None)
            side = getattr(config, "sample_size", None) if side is None else side
            factor = getattr(self._pipeline, "vae_scale_factor", 8)
            value = side * factor if isinstance(side, int) else None
        return None if value is inspect.Parameter.empty else value

    def refuse_unknown(self, params: dict[str, Any]) -> None:
        """Raises `BadRequest` that names the first parameter, or choice, that there is not."""
        valid = {spec.name: spec.choices for spec in self.params}
        for name, value in params.items():
            if choices := valid.get(name):
                if value is not None and value not in choices:
                    raise BadRequest(
                        f"stage '{self.stage}' has no {name} '{value}'",
                        param=name,
                        stage=self.stage,
                        hint=nearest(str(value), choices),
                    )
            elif name not in valid:
                raise BadRequest(
                    f"stage '{self.stage}' takes no parameter '{name}'",
                    param=name,
                    stage=self.stage,
                    hint=nearest(name, valid),
                )

    def steps(self, params: dict[str, Any]) -> int:
        """Denoise steps that a request asks for."""
        asked = params.get("num_inference_steps") or self._default("num_inference_steps")
        return int(asked or 1)

    def arguments(self, task: Task, seed: int) -> dict[str, Any]:
        """The keyword arguments for `task`. Raises `BadRequest` if something needed is missing."""
        arguments = {
            name: value
            for name, value in task.params.items()
            if name not in _ENGINES and value is not None
        }
        for port in self._tensor_inputs:
            if chunks := task.inputs.tensors(port.name):
                arguments[port.name] = self._value(port.name, chunks)
        if "generator" in self._parameters:
            arguments["generator"] = torch.Generator("cpu").manual_seed(seed)
        self._tell(task, arguments)
        if "output_type" in self._parameters:
            arguments["output_type"] = "pil" if "image" in task.emit else "latent"
        return arguments

    def watch_latents(
        self, arguments: dict[str, Any], done: Callable[[torch.Tensor], None]
    ) -> None:
        """Call `done` with the latents after each step, of a run that goes on to decode them."""
        if "callback_on_step_end" not in self._parameters:
            raise BadRequest(
                f"stage '{self.stage}' cannot give image and latents in one request",
                stage=self.stage,
                hint="ask for one of them",
            )

        def on_step_end(_: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
            done(values["latents"])
            return {}

        arguments["callback_on_step_end"] = on_step_end

    def missing(self, task: Task) -> str | None:
        """What a pipeline may have missed if it failed before it called its model."""
        name = "negative_prompt_embeds"
        if self.reads_text or name not in self._parameters or name in task.inputs.ports():
            return None
        return f"with guidance on, this stage needs {name} too: it holds no text encoder"

    def tiny(self) -> list[dict[str, Any]]:
        """Two small calls to warm up with; none if their inputs cannot be made up."""
        config = getattr(getattr(self._pipeline, "transformer", None), "config", None)
        width = getattr(config, "cap_feat_dim", None)
        if self._list_style("prompt_embeds") and width:
            given: list[dict[str, Any]] = [
                {"prompt_embeds": [self._noise(tokens, width)]} for tokens in (8, 12)
            ]
        elif self.reads_text and "prompt" in self._parameters:
            given = [{"prompt": text} for text in ("a circle", "a square")]
        else:
            return []
        return [self._tiny(one, seed) for seed, one in enumerate(given)]

    def _tiny(self, given: dict[str, Any], seed: int) -> dict[str, Any]:
        side = 8 * self.multiple_of
        small = {"height": side, "width": side, "num_inference_steps": 2, "output_type": "pil"}
        small["generator"] = torch.Generator("cpu").manual_seed(seed)
        if "prompt_embeds" in given:
            small |= {"guidance_scale": 0.0, "negative_prompt_embeds": []}
        return given | {k: v for k, v in small.items() if k in self._parameters}

    def _noise(self, *shape: int) -> torch.Tensor:
        noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0))
        return noise.to(self._pipeline.device, self._dtype)

    @property
    def multiple_of(self) -> int:
        """Pixels: heights and widths that the pipeline makes are multiples of this."""
        pipe = self._pipeline
        default = getattr(pipe, "vae_scale_factor", 8)
        factor: int = getattr(pipe, "vae_scale_factor_spatial", default)
        processor = getattr(getattr(pipe, "image_processor", None), "config", None)
        config = getattr(getattr(pipe, "transformer", None), "config", None)
        patch = getattr(config, "patch_size", None) or 1
        patch = patch[-1] if isinstance(patch, list | tuple) else patch
        return math.lcm(factor * patch, getattr(processor, "vae_scale_factor", 1))

    @property
    def _takes_embeddings(self) -> bool:
        return "prompt_embeds" in self._parameters

    @property
    def _dtype(self) -> torch.dtype:
        parts = self._pipeline.components
        denoiser = parts.get("transformer") or parts.get("unet") or self._pipeline
        dtype: torch.dtype = denoiser.dtype
        return dtype

    def _tell(self, task: Task, arguments: dict[str, Any]) -> None:
        """Add the prompt, or check that its embeddings are there."""
        if "prompt" not in self._parameters:
            return
        if "prompt_embeds" in arguments:
            if "negative_prompt_embeds" in arguments and "negative_prompt" in self._parameters:
                arguments["negative_prompt"] = None  # some default to "", and refuse both
            if self._list_style("negative_prompt_embeds") and self._unguided(arguments):
                arguments.setdefault("negative_prompt_embeds", [])
            return
        if not self.reads_text:
            raise BadRequest(
                f"stage '{self.stage}' got no prompt_embeds and holds no text encoder",
                param="prompt_embeds",
                stage=self.stage,
                hint=f"lead an edge to {self.stage}.prompt_embeds or load the text encoder",
            )
        prompt = "".join(task.inputs.texts("prompt")) or _prompt(task.values)
        if prompt is None:
            raise BadRequest(
                f"stage '{self.stage}' got neither a prompt nor prompt_embeds",
                param="prompt",
                stage=self.stage,
            )
        arguments["prompt"] = prompt

    def _unguided(self, arguments: dict[str, Any]) -> bool:
        if "guidance_scale" not in self._parameters:
            return False
        scale = arguments.get("guidance_scale", self._parameters["guidance_scale"].default)
        return scale is not None and scale <= 0

    def _list_style(self, name: str) -> bool:
        parameter = self._parameters.get(name)
        return parameter is not None and _annotation(parameter).lower().startswith(
            ("list[torch", "optional[list[torch")
        )

    def _value(self, name: str, chunks: list[torch.Tensor]) -> Any:
        """An input port's tensor as the pipeline wants it, in memory of our own.

        `[tokens, channels]` and `[batch, tokens, channels]` for embeddings, `[channels]` and
        `[batch, channels]` for pooled ones; a uint8 `[height, width, 3]` becomes a PIL picture.
        """
        whole = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        bounds.check_embeddings(self.stage, name, whole, self._pipeline)
        if "image" in name and whole.dtype is torch.uint8:
            from PIL import Image

            return Image.fromarray(whole.cpu().numpy().copy())
        dtype = self._dtype if name.endswith("_embeds") else whole.dtype
        value = whole.to(self._pipeline.device, dtype, copy=True)
        rank = 2 if "pooled" in name or "mask" in name else 3 if name.endswith("_embeds") else 0
        if self._list_style(name):
            return list(value) if value.ndim == rank else [value]
        return value.unsqueeze(0) if value.ndim == rank - 1 else value

    def _param_specs(self) -> list[ParamSpec]:
        specs = []
        for name, parameter in self._parameters.items():
            if name in _OWN or name.startswith("callback"):
                continue
            if not self.reads_text and ("prompt" in name or name in _OF_TEXT):
                continue
            if kind := _scalar(parameter):
                specs.append(self._param_spec(name, kind))
        if names := tuple(sorted(compatible_schedulers(self._pipeline))):
            about = "class name of diffusers, in place of the pipeline's own"
            specs.append(ParamSpec("scheduler", "str", choices=names, about=about))
        specs.append(ParamSpec("preview_every", "int", 1, about="steps between previews"))
        specs.append(ParamSpec("exact", "bool", about="never computed together with others"))
        seed = ParamSpec("seed", "int", minimum=0, maximum=2**63 - 1, about="of the noise")
        return [*specs, seed] if "generator" in self._parameters else specs

    def _param_spec(self, name: str, kind: Literal["str", "float", "int", "bool"]) -> ParamSpec:
        if name in ("height", "width"):
            step = self.multiple_of
            top = self._limits.max_side
            top = min(top, bounds.longest_side(self._pipeline, name) or top)
            return ParamSpec(name, "int", step, top, multiple_of=step, about="pixels")
        if name == "num_frames":
            return ParamSpec(name, "int", 1, self._limits.max_frames, about="frames of the film")
        if kind == "float" and ("guidance" in name or "cfg_scale" in name):
            return ParamSpec(name, "float", 0)
        if name == "num_inference_steps":
            return ParamSpec(name, "int", 1, self._limits.max_steps, about="denoise steps")
        return ParamSpec(name, kind)


def _tensor_inputs(parameters: dict[str, inspect.Parameter]) -> list[PortSpec]:
    ports = []
    for name, parameter in parameters.items():
        if "Tensor" not in _annotation(parameter) or "ip_adapter" in name:
            continue
        picture = "image" in name and not name.endswith(("_embeds", "_latents"))
        ports.append(PortSpec(name, "image" if picture else "tensor"))
    return ports


def _scalar(parameter: inspect.Parameter) -> Literal["str", "float", "int", "bool"] | None:
    """The kind of a plain number, string or flag; None for anything else."""
    outer = _annotation(parameter)
    if wrapped := re.fullmatch(r"(?:Optional|Union)\[(.*)\]", outer):
        outer = wrapped[1]
    while (plain := re.sub(r"\[[^\[\]]*\]", "", outer)) != outer:
        outer = plain
    members = set(re.split(r"[\s|,]+", outer))
    return next((kind for kind in _KINDS if kind in members), None)


def _annotation(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _has_part(pipeline: Any, prefix: str) -> bool:
    return any(
        part is not None and name.startswith(prefix) for name, part in pipeline.components.items()
    )


def _prompt(values: dict[str, Any]) -> str | None:
    """The prompt, or else what the user said last."""
    if (prompt := values.get("prompt")) is not None:
        return str(prompt)
    said = [turn["content"] for turn in values.get("messages", ()) if turn["role"] == "user"]
    return str(said[-1]) if said else None
