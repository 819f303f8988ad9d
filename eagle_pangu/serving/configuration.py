"""Reads the configuration: defaults, then a TOML file, then the environment, then flags; the later one wins.

Every field has one flag (`--teacher.dtype`), one variable (EAGLE_PANGU_TEACHER__DTYPE) and one place in the file
(`dtype` under `[teacher]`). It knows no field by name; `settings` does.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from eagle_pangu.serving.settings import Section, SectionName, Settings

PREFIX = "EAGLE_PANGU_"
NESTED = "__"
CONFIG_VARIABLE = "EAGLE_PANGU_CONFIG"
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "EAGLE_PANGU_HOME", "EAGLE_PANGU_SUPERVISED"})

Values = dict[str, dict[str, Any]]


class SettingsError(Exception):
    """The configuration cannot be used; the message names the field and where its value came from."""


class _Reader(Settings, BaseSettings):
    """Settings as pydantic-settings wants them, to read one source at a time."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=NESTED, case_sensitive=False, extra="forbid", frozen=True
    )


def load_settings(
    argv: Sequence[str] = (),
    *,
    section: SectionName | None = None,
    program: str = "eagle-pangu",
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """The effective configuration.

    Args:
        argv: Flags, without the program's name; `--help` prints every flag and exits.
        section: Flags of this section may leave out its name: `--dtype` for `--teacher.dtype`.
        program: Name in the usage text.
        overrides: section -> field -> value; stronger than any flag.

    Raises:
        SettingsError: an unknown name or a bad value, anywhere.
    """
    config, flags = _read_flags(argv, section, program)
    config = config or os.environ.get(CONFIG_VARIABLE) or None
    layers: list[tuple[str, Values]] = [
        (f"file {config}", _read_file(config) if config else {}),
        ("environment", _read_environment()),
        ("flag", flags),
        ("flag", {name: dict(values) for name, values in (overrides or {}).items()}),
    ]
    merged: Values = {}
    for _, layer in layers:
        for name, values in layer.items():
            if not isinstance(values, dict):
                raise SettingsError(f"{name}: expected a section, as [teacher], got a value")
            merged.setdefault(name, {}).update(values)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(layers, problem) for problem in error.errors())) from None


def to_toml(settings: Settings) -> str:
    """The whole configuration as a file that `load_settings` reads back to the same values."""
    lines = []
    for name, values in settings.model_dump(mode="json", exclude_none=True).items():
        lines.append(f"[{name}]")
        # JSON strings, numbers and booleans are TOML ones too.
        lines += [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in values.items()]
    return "\n".join([*lines, ""])


def section_variables() -> tuple[str, ...]:
    """Prefixes of the environment variables that set fields, as ``EAGLE_PANGU_TEACHER__``."""
    return tuple(f"{PREFIX}{name.upper()}{NESTED}" for name in Settings.model_fields)


def _read_file(path: str) -> Values:
    if not Path(path).is_file():
        raise SettingsError(f"config: no such file: {path}")
    try:
        return TomlConfigSettingsSource(_Reader, Path(path))()
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"config: {path} is not TOML: {error}") from None


def _read_environment() -> Values:
    for name in os.environ:
        known = name in OTHER_VARIABLES or name.startswith(section_variables())
        if name.startswith(PREFIX) and not known:
            raise SettingsError(f"{name}: unknown environment variable; expected {PREFIX}SECTION{NESTED}FIELD")
    return EnvSettingsSource(_Reader)()


def _read_flags(argv: Sequence[str], section: SectionName | None, program: str) -> tuple[str | None, Values]:
    usage = "%(prog)s [--config FILE] [--FIELD VALUE ...]"
    parser = _Parser(program, usage, __doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", default=None, help="TOML file, one table a section")
    for name, group in Settings.model_fields.items():
        group_type = group.annotation
        assert isinstance(group_type, type)
        assert issubclass(group_type, Section)
        options = parser.add_argument_group(name)
        for field, info in group_type.model_fields.items():
            flags = [f"--{name}.{flag}" for flag in _spellings(field)]
            if name == section:
                flags = [f"--{flag}" for flag in _spellings(field)] + flags
            text = f"{info.description} (default: {info.default!r})".replace("%", "%%")
            # A switch may be named alone, to turn it on.
            alone: dict[str, Any] = {"nargs": "?", "const": "true"} if info.annotation is bool else {}
            options.add_argument(*flags, dest=f"{name}.{field}", metavar="VALUE", help=text, **alone)
    found = vars(parser.parse_args(list(argv)))
    config = found.pop("config")
    values: Values = {}
    for path, value in found.items():
        name, _, field = path.partition(".")
        values.setdefault(name, {})[field] = value
    return config, values


def _spellings(field: str) -> list[str]:
    return [field] if "_" not in field else [field, field.replace("_", "-")]


def _explain(layers: Sequence[tuple[str, Values]], problem: Any) -> str:
    """One problem as ``field: what is wrong, got what (from where)``."""
    path = [str(part) for part in problem["loc"]]
    name, field = path[0], path[1] if len(path) > 1 else ""
    source = next((source for source, layer in reversed(layers) if field and field in layer.get(name, {})), "")
    spelled = {"flag": f"--{name}.{field}", "environment": f"{PREFIX}{name}{NESTED}{field}".upper()}
    where = f" (from {spelled.get(source, source)})" if source else ""
    if problem["type"] == "extra_forbidden":
        return f"{'.'.join(path)}: unknown name{where}"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not field:
        return f"{name}.{message}"  # of a whole section, whose checks say themselves which field and what they got
    return f"{name}.{field}: {message}, got {problem['input']!r}{where}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)
