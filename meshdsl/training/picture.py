"""The loss curve as a picture."""

from pathlib import Path

from matplotlib.figure import Figure

from meshdsl.training.loop import History


def draw_losses(history: History, file: Path, levels: dict[str, float] | None = None) -> Path:
    """Draw training and held-out loss over steps into ``file`` (PNG, SVG or PDF by its suffix).

    Args:
      levels: name -> nats per token, drawn as dashed lines to compare with.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(history.losses) + 1), history.losses, color="#9db4d0", linewidth=1, label="training")
    if history.held_out:
        axes.plot(*zip(*history.held_out, strict=True), color="#1b4f91", marker="o", markersize=3, label="held out")
    for name, level in (levels or {}).items():
        axes.axhline(level, color="#777777", linestyle="--", linewidth=1)
        axes.annotate(name, (len(history.losses), level), ha="right", va="bottom", fontsize=8, color="#555555")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    return file
