"""A llama-server's answer and log, as a trace."""

from collections.abc import Mapping, Sequence
from typing import Any

from specbisect.cell import Cell, DraftModel, ServerSpec, drafter_label
from specbisect.engines.server import reading
from specbisect.engines.server.client import NEUTRAL, Answer
from specbisect.engines.server.flags import NOTHING
from specbisect.engines.server.process import OVERRIDES, External, Server
from specbisect.llama import files, library
from specbisect.trace import Counters, Trace


def account(
    cell: Cell,
    server: Server | External,
    prompt: Sequence[int],
    answer: Answer,
    pieces: Sequence[str],
) -> Trace:
    """The trace of one request: its answer, and with a server of our own what its log says of it."""
    log = server.heard(answer.slot)
    cycles = reading.cycles(log, answer.slot, prompt, answer.ids) if cell.drafter else ()
    counted = sum(c.drafted for c in cycles), sum(c.accepted for c in cycles)
    if counted != (answer.drafted, answer.accepted):
        cycles = ()  # the log does not tell everything; the totals are the server's own
    resolved = _resolved(server, log, answer)
    return Trace(
        arm="speculative" if cell.drafter else "vanilla",
        prompt_ids=tuple(prompt),
        ids=answer.ids,
        finish=answer.finish,
        pieces=tuple(pieces),
        cycles=cycles,
        drafted=answer.drafted,
        accepted=answer.accepted,
        resolved=resolved,
        unhonoured=tuple(_unhonoured(cell, server, resolved, answer)),
        provenance=_provenance(cell, server),
        counters=Counters(
            decode_calls=1 + len(cycles or answer.ids[1:]),
            decoded_tokens=answer.evaluated + (sum(c.width for c in cycles) or len(answer.ids) - 1),
            decode_s=answer.prompt_s + answer.generate_s,
        ),
    )


def _resolved(server: Server | External, log: str, answer: Answer) -> dict[str, Any]:
    """What the server made of the settings, under the names the other engines use."""
    contexts = reading.contexts(server.startup)
    target = (contexts[0] if contexts else {}) | reading.threads(server.startup)
    if isinstance(server, External):  # all there is to tell whether two of them run the same
        target |= {
            "n_ctx_seq": server.about.n_ctx,
            "n_seq_max": server.about.total_slots,
            "model": server.about.model,
        }
    types = str(answer.settings.get("speculative.types", "")).split(",")
    own: dict[str, Any] = {
        "spec_types": [name for name in types if name not in ("", NOTHING)],
        "slots": server.about.total_slots,
        "cached": answer.cached,
    }
    if shares := reading.acceptance_per_position(log, answer.slot):
        own["acceptance_per_position"] = list(shares)
    resolved = {"target": target, "server": own}
    return resolved | ({"draft": contexts[1]} if len(contexts) > 1 else {})


def _unhonoured(
    cell: Cell, server: Server | External, resolved: Mapping[str, Any], answer: Answer
) -> list[str]:
    """Settings that were asked for and not followed, as far as the server tells."""
    got = answer.settings
    asked = dict(NEUTRAL) | {"n_predict": cell.n_predict, "ignore_eos": cell.ignore_eos}
    found = [f"{k} = {v} (got {got[k]})" for k, v in asked.items() if k in got and got[k] != v]
    if cell.drafter and (reason := reading.without_drafter(server.startup)):
        found.append(f"drafter {drafter_label(cell.drafter)} ({reason})")
    if isinstance(server, External):
        return found

    target = resolved["target"]
    n_ctx = target.get("n_ctx", cell.n_ctx)
    most = cell.n_ctx or n_ctx  # llama.cpp's own limit of a batch
    exact: dict[str, Any] = {
        "n_batch": min(cell.n_batch, most),
        "n_ubatch": min(cell.n_ubatch, cell.n_batch, most),
        "n_seq_max": cell.n_parallel,
        "kv_unified": cell.kv_unified,
        "type_k": cell.type_k,
        "type_v": cell.type_v,
        "n_threads": cell.n_threads or library.cores(),
    }
    if cell.flash_attn != "auto":
        exact["flash_attn"] = cell.flash_attn
    found += [f"{k} = {v} (got {target[k]})" for k, v in exact.items() if target.get(k, v) != v]
    if n_ctx < cell.n_ctx:  # it is rounded up
        found.append(f"n_ctx = {cell.n_ctx} (got {n_ctx})")
    return found


def _provenance(cell: Cell, server: Server | External) -> dict[str, Any]:
    own: dict[str, Any] = {"build": server.about.build, "command": server.shown}
    if isinstance(server, External):
        return {"server": own, "target": {"name": server.about.model.get("name", "")}}
    build = server.about.build
    host = dict(library.environment()) | {"library": f"llama-server {build}", "llama_cpp": build}
    host["variables"] = {k: v for k, v in host["variables"].items() if not OVERRIDES.match(k)}
    if info := reading.system_info(server.startup):
        host |= {"system_info": info, "devices": reading.devices(server.startup)}
    if reading.reads_config_file(server.startup):
        own["config_file"] = True
    found = {"host": host, "server": own, "target": files.inspect(cell.target.path).to_json()}
    if isinstance(cell.drafter, DraftModel | ServerSpec) and cell.drafter.model:
        found["draft"] = files.inspect(cell.drafter.model.path).to_json()
    return found
