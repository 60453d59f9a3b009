"""A config from what a user names: a preset, a model on disk, or a run's TOML. No torch."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError, did_you_mean, field_names
from ..model.config import ModelConfig
from ..model.presets import preset, presets


def config_of(
    name: str, ignore_keys: list[str] | None = None, rope_factor: float | None = None
) -> ModelConfig:
    """A preset wins over a folder or an asset of its name (write ./NAME for the folder).

    Otherwise what `open_model` reads from headers, a run's config.toml, or the folder of a run
    without a checkpoint yet.
    """
    if name in presets():
        return preset(name)
    place = Path(name)
    if place.is_dir() and (place / "config.toml").is_file() and not (place / "latest").exists():
        place = place / "config.toml"
    if place.suffix == ".toml":
        from ..train.config import RunConfig

        return RunConfig.read(place).model
    from ..assets import ASSETS

    if name in ASSETS or "/" in name or place.exists():
        from ..weights import open_model

        return open_model(name, ignore_keys or (), rope_factor).config
    near = did_you_mean(name, presets()) or f"; presets: {', '.join(presets())}"
    raise ConfigError(f"{name!r} is no preset and no path{near}")


def nothing_named(says: str, out: Path, resume: bool) -> ConfigError:
    """Where a command has neither a run to resume nor what one begins with, which `says` names."""
    if resume:
        says = (
            f"{out} holds no run to resume, for it has no config.toml; mend --out, or begin one: "
            + says
        )
    return ConfigError(says)


def with_settings(cfg: ModelConfig, settings: list[str] | None) -> ModelConfig:
    """`--set` as `train` takes it, for the fields of a model alone."""
    if not settings:
        return cfg
    from ..train.config import RunConfig, TrainConfig

    for pair in settings:
        if (key := pair.partition("=")[0]) in field_names(TrainConfig):
            raise ConfigError(f"--set {pair}: {key} is a field of the training; leave it out here")
    return RunConfig(model=cfg, train=TrainConfig(), data="").set(settings).model
