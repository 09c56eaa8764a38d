"""jax's errors about specs that do not fit their arrays, in the words of the step.

jax raises them where the step calls ``jax.shard_map``, ``jax.jit(in_shardings=)``, ``jax.device_put`` or
``jax.sharding.reshard``. They are long and speak of devices; what counts is the line, the spec, the array, and what
would fit. The texts are those of jax 0.10 and 0.12; an error of another text passes unchanged.
"""

import re
from collections.abc import Callable, Mapping

from meshdsl.errors import nearest
from meshdsl.trace.source import raised_at

SPEC_REMEDY = (
    "a spec names axes of its mesh, at most one entry per dim, and blocks are equal: change the spec, or pad the dim"
)
NO_SPECS = "its in_specs are not stated; blocks would depend on where arguments lie"

Told = Callable[[Mapping[str, str]], str]


def spec_faults(error: Exception) -> list[str]:
    """Returns a row per array that does not fit its spec, with the user's line; none for any other error."""
    if not isinstance(error, ValueError | TypeError | RuntimeError):
        return []
    found = (told(match.groupdict()) for pattern, told in _TOLD.items() for match in pattern.finditer(str(error)))
    return [f"{raised_at(error)}: {text}" for text in dict.fromkeys(found)]


def asks_for_types(error: Exception) -> bool:
    """Whether an error, or its cause, is that a shard_map over Explicit axes has other specs than its operands."""
    return any(_TYPES.search(str(each)) is not None for each in (error, error.__cause__))


def _uneven(said: Mapping[str, str]) -> str:
    size, blocks = int(said["size"]), int(said["blocks"])
    below = size // blocks * blocks
    sizes = ", ".join(str(n) for n in (below, below + blocks) if n)
    spec = f"{said['by']}={said['spec']}" if "by" in said else f"P{said['spec']}"
    array = f"{said['at']} {said['type']}" if "at" in said else f"an array of shape ({said['shape']})"
    what = f"dim {said['dim']} of {array} into {blocks} blocks, and {size} does not divide into them"
    return f"{spec} splits {what}; nearest sizes that work: {sizes}"


def _rank(said: Mapping[str, str]) -> str:
    spec = f"{said['by']}={said['spec']}" if "by" in said else f"P{said['spec']}"
    return f"{spec} has more entries ({said['length']}) than {said.get('type', 'its array')} has dims ({said['rank']})"


def _type(said: Mapping[str, str]) -> str:
    what = f"in_specs={said['spec']} is not the type {said['type']} of {said['array']}"
    return f"{what}, and the axes of the mesh are Explicit; {_AUTO}, or use jax.sharding.reshard"


def _inferred(said: Mapping[str, str]) -> str:
    return NO_SPECS


def _axis(said: Mapping[str, str]) -> str:
    known = sorted(re.findall(r"'(.*?)'", said["known"]))
    return f"{said['by']} names axis {said['name']!r}, which the shard_map does not have{nearest(said['name'], known)}"


def _unmeshed(said: Mapping[str, str]) -> str:
    names, known = (sorted(re.findall(r"'(.*?)'", said[which])) for which in ("names", "known"))
    stray = next(name for name in names if name not in known)
    return f"axis_names has {stray!r}, an axis that the mesh of the shard_map lacks{nearest(stray, known)}"


def _lengths(said: Mapping[str, str]) -> str:
    of = "arguments" if said["by"] == "in_specs" else "results"
    return f"{said['by']} is for {said['given']} of the {said['wanted']} {of} of the function"


def _varying(said: Mapping[str, str]) -> str:
    axes = said["axes"].replace(",", ", ")
    what = f"out_specs={said['spec']} says that a result is equal on all devices along {axes}, and jax cannot tell that"
    return f"{what}; reduce it in the body, name the axis in the spec, or let check_vma=False vouch for it"


def _no_mesh(said: Mapping[str, str]) -> str:
    return "a spec without a mesh, and no mesh is ambient: state mesh= of jax.shard_map, or NamedSharding(mesh, spec)"


_AUTO = "make it with axis_types=(jax.sharding.AxisType.Auto,) * n"
_TYPES = re.compile(
    r"in_specs passed to shard_map: (?P<spec>P\(.*?\)) does not match the specs of the input: (?P<type>P\(.*?\)) "
    r"for arg: (?P<array>\S+)\."
)
_TOLD: Mapping[re.Pattern[str], Told] = {
    _TYPES: _type,
    re.compile(r"shard_map in_specs argument must be a pytree .*? but it was `None`"): _inferred,
    re.compile(  # shard_map
        r"passed (?P<at>\S+) of shape (?P<type>\S+\]),.*? corresponds to (?P<by>in_specs\S*) of value (?P<spec>.*?), "
        r"which maps array axis (?P<dim>\d+) \(of size (?P<size>\d+)\) to .*?of (?:total )?size (?P<blocks>\d+)\)"
    ): _uneven,
    re.compile(  # jit, device_put, reshard
        r"spec(?:=P| )(?P<spec>\([^=]*?\))[^)]*?\)? implies that array axis (?P<dim>\d+) is partitioned "
        r"(?P<blocks>\d+) times, but .*?dimension size (?:is )?(?P<size>\d+).*?shape: \((?P<shape>[\d, ]*)\)"
    ): _uneven,
    re.compile(  # shard_map
        r"(?P<by>(?:in|out)_specs\S*) is (?P<spec>P\(.*?\)) which has length (?P<length>\d+), but .*?"
        r"has shape (?P<type>\S+\])\S*, which has rank (?P<rank>\d+)"
    ): _rank,
    re.compile(  # with_sharding_constraint
        r"spec=P(?P<spec>\([^=]*?\)),[^(]* is only valid for values of rank at least (?P<length>\d+), but was "
        r"applied to a value of rank (?P<rank>\d+)"
    ): _rank,
    re.compile(  # shard_map
        r"marked as manual \(frozenset\(\{(?P<known>.*?)\}\)\).*?(?P<by>(?:in|out)_specs) refers to '(?P<name>\S+)'",
        re.DOTALL,
    ): _axis,
    re.compile(
        r"shard_map requires axis_names=frozenset\(\{(?P<names>.*?)\}\) to be a subset of "
        r"mesh.axis_names=frozenset\(\{(?P<known>.*?)\}\)"
    ): _unmeshed,
    re.compile(
        r"different lengths of (?:tuple|list) at key path\s+shard_map (?P<by>in_specs|out_specs)\n.*?"
        r"of length (?P<given>\d+), but .*?of length (?P<wanted>\d+)",
        re.DOTALL,
    ): _lengths,
    re.compile(
        r"out_specs\S* is (?P<spec>P\(.*?\)) which implies that the corresponding output value is only varying across "
        r"mesh axes \{.*?\} and not \{(?P<axes>.*?)\}"
    ): _varying,
    re.compile(r"The context mesh cannot be empty|requires a non-empty mesh in context"): _no_mesh,
}
