"""Rotary parameters of a stored head: three spellings in, one out.

transformers 5 writes `rope_parameters`; older producers `rope_theta` and `rope_scaling`, whose kind is `rope_type` or
`type`; some write all of it. A head that names no base was trained with 10000, whatever its teacher has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eagle_pangu.speculation.eagle3.fields import Fields

DEFAULT_THETA = 10000.0


class _Keys(NamedTuple):
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_ORIGINAL = "original_max_position_embeddings"
# Those that change as a sequence grows (dynamic, longrope) are left out: keys in the draft's cache are rotated once.
_KINDS = {
    "default": _Keys(),
    "linear": _Keys(("factor",)),
    "llama3": _Keys(("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
    "yarn": _Keys(
        ("factor",), (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
    ),
}


def parse_rope(layer: Fields) -> dict[str, Any]:
    """`rope_parameters` as transformers has them, from the object that describes the layer.

    Raises:
        HeadError: a kind or key that is not known, one that is missing, or two spellings that disagree.
    """
    layer.expect("partial_rotary_factor", 1.0)
    modern, legacy = layer.section("rope_parameters"), layer.section("rope_scaling")
    scaling = _scaling(modern if modern.values else legacy)
    if modern.values and legacy.values and _scaling(legacy) != scaling:
        raise layer.fault("rope_scaling", f"what rope_parameters say, {scaling}")
    return {**scaling, "rope_theta": _theta(layer, modern, legacy)}


def rope_fields(parameters: dict[str, Any]) -> dict[str, Any]:
    """The older spelling, which every reader knows: `rope_theta` and `rope_scaling`."""
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {
        "rope_theta": parameters.get("rope_theta", DEFAULT_THETA),
        "rope_scaling": None if plain else scaling,
    }


def _scaling(section: Fields) -> dict[str, Any]:
    """The section without its base, nulls and synonyms."""
    section.expect("partial_rotary_factor", 1.0)
    section.expect("rope_type", *_KINDS)
    section.expect("type", *([section.values["rope_type"]] if section.has("rope_type") else _KINDS))
    kind = section.values.get("rope_type") or section.values.get("type") or "default"
    keys = _KINDS[kind]
    scaling: dict[str, Any] = {"rope_type": kind}
    for name in section.values:
        if name in ("rope_type", "type", "rope_theta", "partial_rotary_factor") or not section.has(name):
            continue
        if name not in keys.required + keys.optional:
            raise section.fault(name, f"no such field with rope type {kind}")
        scaling[name] = section.values[name]
    for name in (*keys.required, *scaling):
        if name not in ("rope_type", "truncate"):
            section.number(name)
    return scaling


def _theta(*mentions: Fields) -> float:
    """The base, which may stand in several places but must be the same in all of them."""
    thetas = {fields.path: fields.number("rope_theta") for fields in mentions if fields.has("rope_theta")}
    theta = next(iter(thetas.values()), DEFAULT_THETA)
    for fields in mentions:
        if thetas.get(fields.path, theta) != theta:
            raise fields.fault("rope_theta", f"{theta} as in {next(iter(thetas))}rope_theta")
    return theta
