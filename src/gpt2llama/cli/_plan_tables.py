"""What `gpt2llama plan` has found, as tables of at most 80 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import counted

Found = dict[str, Any]  # what `plan --json` prints


def one(found: Found) -> None:
    """All that was asked about one config."""
    console = Console(highlight=False)
    console.print(_parts(found))
    console.print(_bytes(found))
    console.print(_training_memory(found))
    for line in _fits(found):
        console.print(line, markup=False)
    if "roofline" in found:
        console.print(_speeds(found))
        console.print("Weights alone: bandwidth over all weights, the rule of thumb for one text.")
    if "training" in found:
        training = found["training"]
        tokens, flops = counted(training["tokens"], "token"), f"{training['flops']:.4g} FLOPs"
        console.print(f"to train on {tokens}: {flops}")
        if training["on"]:
            console.print(_training(training))


def side_by_side(first: Found, second: Found) -> None:
    """Every figure of both, and the second's as a multiple of the first's."""
    table = _table("", "", first["name"], second["name"], "ratio")
    left, right = _figures(first), _figures(second)
    for label, (one, two) in {k: (left[k], right[k]) for k in left}.items():
        ratio = _three(two / one) if one else "–"
        table.add_row(label, _exact(one), _exact(two), ratio)
    Console(highlight=False).print(table)


def changes(
    base: str, before: dict[str, str], after: dict[str, str], steps: list[dict[str, Any]]
) -> None:
    """before, after: every field of both configs as it is shown; steps: what differs."""
    if not steps:
        return
    console = Console(highlight=False)
    table = _table(
        f"what each field changes, alone, from {base}",
        *("", "", "parameters", "FLOPs", "KV bytes"),
    )
    table.columns[1].justify = "left"
    for step in steps:
        name = step["field"]
        old, new = (shown[name].split(", ")[0] for shown in (before, after))
        keys = ("parameters", "flops_per_token", "kv_bytes_per_token")
        table.add_row(name, escape(f"{old} → {new}"), *(_difference(step[key]) for key in keys))
    console.print(table)
    console.print("FLOPs to train on a token at max_seq_len; KV bytes of a token.")
    for step in steps:
        if step["refused"]:
            rule = step["refused"].partition(" (got ")[0]
            console.print(f"{step['field']} cannot change alone: {rule}.", markup=False)


def _table(title: str, *headers: str) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=any(headers))
    for i, header in enumerate(headers):
        table.add_column(escape(header), justify="right" if i else "left", overflow="fold")
    return table


def _parts(found: Found) -> Table:
    table, total = _table(found["name"], "", "", ""), found["parameters"]
    for part, count in found["parts"].items():
        table.add_row(part, f"{count:,}", f"{count / total:.1%}", end_section=part == "head")
    table.add_row("total", f"{total:,}", "100.0%", end_section=True)
    tokens = counted(found["context"], "token")
    table.add_row(f"training FLOPs per token, {tokens}", f"{found['flops_per_token']:,}", "")
    for label, count in {
        f"weight bytes, {found['dtype']}": found["weight_bytes"],
        f"KV bytes, {found['kv_dtype']}, {found['batch']:,} × {tokens}": found["kv_bytes"],
    }.items():
        table.add_row(label, f"{count:,}", _binary(count))
    return table


def _bytes(found: Found) -> Table:
    table = _table(
        f"in memory, {found['batch']:,} × {counted(found['context'], 'token')}",
        *("", "weights", "KV cache", "together"),
    )
    for dtype, held in found["bytes"].items():
        both = held["weights"] + held["kv"]
        table.add_row(dtype, *map(_binary, (held["weights"], held["kv"], both)))
    return table


def _training_memory(found: Found) -> Table:
    memory = found["training_memory"]
    batches = f"{memory['accumulate']:,} × " if memory["accumulate"] > 1 else ""
    table = _table(
        f"to train, {batches}{found['batch']:,} × {counted(found['context'], 'token')}, "
        f"{memory['optimizer_name']}, fp32, on a CPU",
        *("", "bytes", ""),
    )
    for part in ("weights", "optimizer", "gradients", "activations", "workspace"):
        count, last = memory[part], part == "workspace"
        table.add_row(part, f"{count:,}", _binary(count), end_section=last)
    peak = memory["peak"]
    table.add_row(f"peak: {memory['moment']}", f"{peak:,}", _binary(peak), end_section=True)
    for part, count in memory["activations_by_part"].items():
        table.add_row(f"activations at the loss: {part}", f"{count:,}", _binary(count))
    return table


def _fits(found: Found) -> list[str]:
    lines = []
    for fit in found.get("fits", ()):
        name, size = fit["memory"], f"{fit['bytes'] / 1e9:,.4g} GB"
        start = name if name[0].isdigit() else f"{name}, {size}"
        if found["weight_bytes"] > fit["bytes"]:
            held = f"{found['weight_bytes'] / 1e9:,.4g} GB"
            lines.append(f"{start}: even the {found['dtype']} weights do not fit, {held}.")
            continue
        longest = counted(fit["largest_context"], "token")
        if fit["largest_context"] > found["max_seq_len"]:
            longest += f" (max_seq_len is {found['max_seq_len']:,})"
        lines.append(
            f"{start}: at {counted(found['context'], 'token')} a batch of at most "
            f"{fit['largest_batch']:,}; at batch {found['batch']:,} at most {longest}."
        )
    return [*lines, "Activations and the framework's own memory come on top."] if lines else []


def _speeds(found: Found) -> Table:
    table = _table(
        f"tokens a second at most: {found['dtype']}, KV {found['kv_dtype']}, "
        f"{found['batch']:,} × {counted(found['context'], 'token')}",
        *("", "prefill", "limit", "decode", "limit", "weights alone"),
    )
    for speed in found["roofline"]:
        cells = [speed["hardware"]]
        for kind in ("prefill", "decode"):
            cells += [_three(speed[kind]["tokens_per_second"]), speed[kind]["limit"]]
        table.add_row(*cells, _three(speed["weights_alone_tokens_per_second"]))
    return table


def _training(training: dict[str, Any]) -> Table:
    table = _table("", f"at MFU {training['mfu']:g}", "hours of one device", "cost")
    for each in training["on"]:
        cost = "–" if each["cost"] is None else f"{each['cost']:,.2f}"
        table.add_row(each["hardware"], _three(each["hours"]), cost)
    return table


def _figures(found: Found) -> dict[str, float]:
    """The numbers that two configs are compared by."""
    figures: dict[str, float] = {
        **found["parts"],
        "parameters": found["parameters"],
        "max_seq_len": found["max_seq_len"],
        "context": found["context"],
        "training FLOPs per token": found["flops_per_token"],
        f"weight bytes, {found['dtype']}": found["weight_bytes"],
        f"KV bytes, {found['kv_dtype']}": found["kv_bytes"],
        "KV bytes per token": found["kv_bytes_per_token"],
        f"training bytes, {found['training_memory']['optimizer_name']}": (
            found["training_memory"]["peak"]
        ),
    }
    for fit in found.get("fits", ()):
        figures[f"{fit['memory']}: largest batch"] = fit["largest_batch"]
        figures[f"{fit['memory']}: largest context"] = fit["largest_context"]
    for speed in found.get("roofline", ()):
        for kind in ("prefill", "decode"):
            figures[f"{speed['hardware']}: {kind} tokens/s"] = speed[kind]["tokens_per_second"]
    if "training" in found:
        figures["training FLOPs"] = float(found["training"]["flops"])
        for each in found["training"]["on"]:
            figures[f"{each['hardware']}: training hours"] = each["hours"]
    return figures


def _binary(count: int) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.2f} {unit}"
    return f"{count / 2**20:,.2f} MiB"


def _exact(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else _three(number)


def _three(number: float) -> str:
    """Three digits or more, with an exponent only beyond a billion."""
    return f"{number:,.0f}" if 100 <= number < 1e9 else f"{number:.3g}"


def _difference(count: int | None) -> str:
    """+262.7M, −82.94K, 0; – where there is none."""
    if count is None:
        return "–"
    if count == 0:
        return "0"
    size, sign = float(abs(count)), "+" if count > 0 else "−"
    for unit in ("", "K", "M", "B"):
        if size < 999.95:
            return f"{sign}{size:.4g}{unit}"
        size /= 1000
    return f"{sign}{size:,.4g}T"
