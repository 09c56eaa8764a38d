"""Topologies as files: the TOML of the presets, so that a measured one can be kept, read and edited."""

import json
import tomllib
from dataclasses import fields
from pathlib import Path

from meshdsl.errors import ArgumentError, MeshDSLError
from meshdsl.layouts.topology import Link, Topology, read_topology


def save_topology(topology: Topology, file: str | Path) -> None:
    """Write ``topology`` to ``file``, as ``load_topology`` and a person read it."""
    Path(file).write_text(topology_text(topology))


def load_topology(file: str | Path) -> Topology:
    """The topology in ``file``; MeshDSLError if there is none that can be read."""
    try:
        return read_topology(tomllib.loads(Path(file).read_text()))
    except OSError as error:
        raise MeshDSLError(f"cannot read the topology {str(file)!r}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MeshDSLError(f"{str(file)!r} is no topology: {error}") from error
    except ArgumentError as error:
        raise MeshDSLError(f"{str(file)!r} is no topology:\n{error}") from error


def topology_text(topology: Topology) -> str:
    """The TOML of ``topology``; reading it back gives an equal value."""
    plain = [f.name for f in fields(Topology) if f.name not in ("links", "axes")]
    lines = [f"{name} = {_toml(getattr(topology, name))}" for name in plain]
    for link in topology.links:
        lines += ["", "[[links]]", *_link(link)]
    for name, link in topology.axes:
        lines += ["", f"[axes.{json.dumps(name)}]", *_link(link)]
    return "\n".join(lines) + "\n"


def _link(link: Link) -> list[str]:
    hidden = {name for name in ("shared", "short") if not getattr(link, name)}
    hidden |= {"torus", "ring"} if not link.torus else set()
    known = [f.name for f in fields(Link) if f.name not in hidden]
    return [f"{name} = {_toml(getattr(link, name))}" for name in known]


def _toml(value: str | float | tuple[int, ...]) -> str:
    return (
        repr(list(value)) if isinstance(value, tuple) else json.dumps(value) if isinstance(value, str) else repr(value)
    )
