"""MPT with PyTorch FSDP on A100 and H100 (benchmarking page of mosaicml/llm-foundry)."""

from collections.abc import Iterator

import meshdsl as md
from bench.published.case import Case, rows, stages
from meshdsl.models.gpt import Config

TABLE = "mosaic_mpt"
SIZES = {  # layers, width, heads: scripts/train/yamls/pretrain of mosaicml/llm-foundry
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
HARDWARE = {"a100_80gb": "dgx-a100", "a100_40gb": "dgx-a100", "h100_80gb": "dgx-h100"}
MEMORY = {"a100_40gb": 1.555e12}  # bytes per second from the data sheet, where it differs from the preset


def reason(row: dict[str, str]) -> str:
    """Returns why a row cannot be scored; empty if it can."""
    return "products in FP8, which no row is planned with yet" if row["precision"] == "amp_fp8" else ""


def cases() -> Iterator[Case]:
    """Yields every row that can be scored."""
    for i, row in enumerate(rows(TABLE)):
        if not reason(row):
            yield _case(i, row)


def _case(number: int, row: dict[str, str]) -> Case:
    model, seq, gpus = row["model"], int(row["seqlen_t"]), int(row["gpus"])
    layers, width, heads = SIZES[model]
    remat = "all" if row["activation_checkpointing"] == "True" else "none"
    config = Config(layers, width, heads, seq=seq, vocab=50368, remat=remat, dtype="bfloat16", attend="masked")
    measured = float(row["globalbatchsize_t"]) / float(row["throughput_t_s"])
    batch = round(int(row["globalbatchsize_t"]) / seq)
    label = f"{model} seq{seq} {row['gpu']} x{gpus} mbs{row['microbatchsize']} gbs{batch}{' remat' * (remat == 'all')}"
    rules = md.Rules("batch:data", params="embed:data", optimizer="embed:data")
    return Case(
        TABLE,
        number,
        label,
        f"MPT {model} {row['gpu']}",
        HARDWARE[row["gpu"]],
        config,
        batch,
        f"data={gpus}",
        measured,
        rules,
        stages(1, int(row["gradaccum"])),
        memory_bandwidth=0.9 * MEMORY.get(row["gpu"], 0.0),
    )
