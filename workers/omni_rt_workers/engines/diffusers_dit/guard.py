"""What must be installed for this engine, checked before anything heavy is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from omni_rt.errors import ConfigError

# diffusers is called through its public API only, but shells copy pipeline objects: a release is
# added here once the parity tests have passed on it.
DIFFUSERS = ("0.42",)
_MEND = "pip install 'diffusers==0.42.*' torch transformers greenlet pillow"
_NEEDED = ("diffusers", "torch", "transformers", "greenlet", "pillow")


def check(stage: str) -> tuple[str, ...]:
    """Notes about the versions found. Raises `ConfigError` with the command that mends it."""
    found = {name: _version(name) for name in _NEEDED}
    if missing := [name for name, number in found.items() if number is None]:
        raise ConfigError(
            f"stage '{stage}': engine diffusers needs {', '.join(missing)}",
            stage=stage,
            hint=f"run: {_MEND}",
        )
    diffusers = str(found["diffusers"])
    if not diffusers.startswith(tuple(f"{tested}." for tested in DIFFUSERS)):
        raise ConfigError(
            f"stage '{stage}': diffusers {diffusers} is untested (tested: {', '.join(DIFFUSERS)})",
            stage=stage,
            hint=f"run: {_MEND}",
        )
    return (f"diffusers {diffusers}, torch {found['torch']}",)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
