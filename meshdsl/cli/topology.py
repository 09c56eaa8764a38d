"""``meshdsl topology``: presets of links and devices, and calibration of this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshdsl.cli.options import DEFAULT_MESH, AsJSON, MeshText
from meshdsl.cli.output import check_writable, show, working
from meshdsl.cli.programs import load_mesh, load_topology_named
from meshdsl.layouts.topology import Link, preset_names, save_topology, topology, topology_text
from meshdsl.util.text import bytes_text

app = typer.Typer(
    no_args_is_help=True, help="Constants of links and devices: presets, and calibration of this machine."
)


@app.command("list")
def list_presets(as_json: AsJSON = False) -> None:
    """List the presets: FLOP/s in 16 and 32 bits, memory, links with the devices each joins, and sources."""
    found = [topology(name) for name in preset_names()]
    lines = (
        f"{t.name:14} {t.flops16 / 1e12:7.4g} {t.flops32 / 1e12:7.4g} TFLOP/s  {bytes_text(int(t.memory)):>7}  "
        f"{', '.join(map(_link, t.links))}\n{'':14} {t.source}"
        for t in found
    )
    show("topology list", "\n".join(lines), {"topologies": [t.name for t in found]}, as_json)


def _link(link: Link) -> str:
    """One level of the network in a few words."""
    joined = "x".join(map(str, link.torus)) or str(link.devices or "any")
    return f"{joined} devices at {bytes_text(int(link.bandwidth))}/s"


@app.command("show")
def show_one(
    name: Annotated[
        str, typer.Argument(help="a preset or a TOML file", show_default=False, autocompletion=preset_names)
    ],
    as_json: AsJSON = False,
) -> None:
    """Show one topology as the TOML that ``--topology`` takes."""
    found = load_topology_named(name)
    show("topology show", topology_text(found).removesuffix("\n"), asdict(found), as_json)


@app.command()
def calibrate(
    mesh: MeshText = DEFAULT_MESH,
    save: Annotated[Path | None, typer.Option(help="write the topology to this TOML file")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="plans over this mesh on this machine take it by default")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Measure this machine: latency and bandwidth of every axis, FLOP/s, memory bandwidth; under a minute."""
    import jax

    from meshdsl.calibrate import calibrate as measure

    check_writable(save)
    over = load_mesh(mesh)
    jax.config.update("jax_num_cpu_devices", over.size)
    with working(f"measuring {over}"):
        found = measure(over, keep=keep)
    if save is not None:
        save_topology(found, save)
    show("topology calibrate", topology_text(found).removesuffix("\n"), asdict(found), as_json)
